"""What the name of a column says about its values."""

import re

LABEL = re.compile(r"(?i)(^|_|is)(label|target|click|purchase|buy|bought|conver|like|order)")
ID = re.compile(
    r"(?i)(^|_)id$|(?-i:Id$)|code|zip|user|member|customer|visitor|item|article|product|sku|movie|song|video|categor|brand"
)
ID_OF_FEW_ROWS = re.compile(
    r"(?i)(^|_)(session|impression|request|visit|basket|order|invoice|transaction)s?(_?(id|uuid|key|no|number))?$"
)
SHOWN_AT = re.compile(r"(?i)(^|_)(position|pos|slot|rank)$")
WEIGHT = re.compile(r"(?i)(^|_)weights?$")
TIME = re.compile(r"(?i)(^|_)ts$|day$|hour|month|year|time|date")
_MEASURE = re.compile(
    "ms|msec|millis|milliseconds|secs?|seconds|mins?|minutes|hours|days|since|durations?|length|elapsed|spent|dwell|latency"
    "|played|watch|watched|listened|distance|km|meters|prices?|costs?|amount|revenue|spend|income|salary|budget|balance"
    "|discount|counts?|num|qty|quantity|size|bytes|kb|mb|width|height|score"
)
_END_OF_ID = re.compile("ids?|uuid|key|code|no|number|bucket|group|type|class")


def is_measure(name: str) -> bool:
    """Return whether a name has a word for a quantity, as `ms_played` has, and not the end of an id's name."""
    words = [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]
    return any(map(_MEASURE.fullmatch, words)) and not _END_OF_ID.fullmatch(words[-1])
