"""The original's helpers for benchmark scripts and tests."""

from __future__ import annotations

import argparse
import unittest

from sgl.compat.utils import normalize_base_url
from sgl.errors import ConfigError
from sgl.lang.backends.base import Backend
from sgl.lang.backends.openai import OpenAI
from sgl.lang.backends.server import RuntimeEndpoint

DEFAULT_MODEL_NAME_FOR_TEST = "meta-llama/Llama-3.1-8B-Instruct"


class CustomTestCase(unittest.TestCase):
    """A test case under the original's name."""


def add_common_sglang_args_and_parse(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Add every script's options and parse."""
    parser.add_argument("--parallel", type=int, default=64)
    parser.add_argument("--host", default="http://127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--backend", default="srt", help="srt: the server at host and port; gpt-…: OpenAI")
    parser.add_argument("--result-file", default="result.jsonl")
    parser.add_argument("--raw-result-file")
    return parser.parse_args()


def select_sglang_backend(args: argparse.Namespace) -> Backend:
    """The backend that --backend names."""
    if args.backend.startswith("srt"):
        return RuntimeEndpoint(normalize_base_url(args.host, args.port))
    if args.backend.startswith("gpt-"):
        return OpenAI(args.backend)
    raise ConfigError(f"no backend {args.backend!r}: srt, or an OpenAI model gpt-…", option="backend")
