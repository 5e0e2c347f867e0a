"""Settings of hypothesis for all tests: no deadlines, since machines differ; the same examples each time in CI."""

from __future__ import annotations

import os

from hypothesis import settings

settings.register_profile("flare", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("flare")
