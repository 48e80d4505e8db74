"""Memory: predicted from a plan, measured in a run, and the report of both."""

from recsys.memory.facts import DataFacts, Decoding, DenseFacts, RankMemory
from recsys.memory.measure import BudgetExceeded, Timeline, peak_rss
from recsys.memory.predict import predict
from recsys.memory.tensors import measure_dense, predict_dense, table_entries
