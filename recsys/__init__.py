"""Distributed training of user-item models with sharded, hashed, mixed-precision embedding tables."""
