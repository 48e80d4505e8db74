"""The sharded half: tables for torchrec, their bytes, the sharding plan, sharded and replicated tables."""
