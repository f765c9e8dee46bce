"""Serving engines: requests in, tokens with time stamps out."""

from __future__ import annotations

from kvlib.engines.base import Engine, Request, Result
from kvlib.engines.local import LocalEngine
from kvlib.metrics import Usage

__all__ = ["Engine", "LocalEngine", "Request", "Result", "Usage"]
