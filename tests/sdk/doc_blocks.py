"""Run the Python blocks of a page as a service would, with the names that a service has before it uses the client."""

import ast
import inspect
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from halfnote.testing import SECRET
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

ROOT = Path(__file__).parent.parent.parent
SCHEMA = 'create table orders (number int primary key); create table points ("order" int primary key)'


class Base(DeclarativeBase):
    """The service's models."""


class Order(Base):
    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True)


class Points(Base):
    __tablename__ = "points"
    order: Mapped[int] = mapped_column(primary_key=True)


def blocks_of(page: str) -> list[str]:
    """Return the Python blocks of a page, which is named by its path from the repository's root."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def shell_blocks_of(page: str) -> list[str]:
    """Return a page's shell blocks, without its `pip install` lines."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
    return [block for block in blocks if not block.startswith("pip install")]


def runner(page: str) -> Callable[[str, dict[str, Any]], Awaitable[None]]:
    """Return a function that runs a block as the body of an async function, with its addresses and secrets replaced."""

    async def run(block: str, names: dict[str, Any]) -> None:
        written = block.replace("whsec_…", SECRET)
        for made in (
            'TransactionProducer("http://127.0.0.1:8080", group="shop"',
            'Consumer("http://127.0.0.1:8080", "points"',
        ):
            written = written.replace(made, f"{made}, transport=memory.transport()")
        code = compile(written, page, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        answer = eval(code, names)
        if inspect.iscoroutine(answer):
            await answer

    return run
