# MuJoCo's names come out of compiled modules without stubs: every one is Any to the type checker.
from typing import Any

def __getattr__(name: str) -> Any: ...
