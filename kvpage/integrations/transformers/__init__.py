"""Hugging Face transformers: a cache whose keys, values and states live in kvpage blocks (docs/transformers.md)."""

from kvpage.integrations.transformers.cache import KvpageCache as KvpageCache
from kvpage.integrations.transformers.pool import ModelPool as ModelPool
from kvpage.integrations.transformers.request import plan_request as plan_request
