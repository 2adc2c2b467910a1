"""Private names of libraries stand in one module, and the installed versions still have them."""

import inspect
import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from program import CACHE, FOLDER, cache_restored

try:
    from ltx2_cli.private_api import COMPILED_EVENT, READ_EVENT, coordination_client
except ImportError as error:
    pytest.fail(f"jax {version('jax')} no longer has what ltx2_cli/private_api.py takes from it: {error}")

PACKAGE = Path(__file__).parent.parent / "ltx2_cli"
PRIVATE = re.compile(r"\b(jax|jaxlib|flax|torch|torchax|transformers|huggingface_hub|typer|click)(\.\w+)*\._[a-z]")


def test_private_names_are_used_in_one_module_alone() -> None:
    sources = {path.name: path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
    found = {name: match[0] for name, text in sources.items() if (match := PRIVATE.search(text))}
    assert found.keys() == {"private_api.py"}, found


@pytest.mark.parametrize(
    ("module", "name", "used"),
    [
        ("jax._src.compilation_cache", "get_executable_and_time", ["cache_key"]),
        ("jax._src.compiler", "backend_compile_and_load", ["backend", "module"]),
    ],
)
def test_replaced_functions_still_exist(module: str, name: str, used: list[str]) -> None:
    broken = f"jax {version('jax')} no longer has {module}.{name}"
    try:
        parameters = [*inspect.signature(vars(import_module(module))[name]).parameters]
    except (ImportError, KeyError):
        pytest.fail(broken)
    assert parameters[: len(used)] == used, f"{broken} of {used}: {parameters}"


def test_the_coordination_client_still_exchanges_texts() -> None:
    try:
        client = coordination_client()
    except AttributeError as error:
        pytest.fail(f"jax {version('jax')} no longer has jax._src.distributed.global_state.client: {error}")
    assert client is None  # this process is alone


@pytest.fixture
def heard(tmp_path: Path) -> Iterator[list[str]]:
    """The names of the events, while what is compiled is kept in a folder of its own."""
    events: list[str] = []

    def listen(event: str, duration: float, **details: object) -> None:
        events.append(event)

    with cache_restored():
        jax.config.update(CACHE, True)
        jax.config.update(FOLDER, str(tmp_path))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        reset_cache()
        jax.monitoring.register_event_duration_secs_listener(listen)
        yield events
        jax.monitoring.unregister_event_duration_listener(listen)


def test_compilation_events_are_still_recorded(heard: list[str]) -> None:
    numbers = jnp.arange(3)
    heard.clear()
    jax.jit(lambda x: x * 11 + 4)(numbers)
    said = f"jax {version('jax')} records {heard}: the programs of a run are counted wrongly"
    assert (heard.count(COMPILED_EVENT), heard.count(READ_EVENT)) == (1, 0), said
    jax.clear_caches()
    heard.clear()
    jax.jit(lambda x: x * 11 + 4)(numbers)
    assert (heard.count(COMPILED_EVENT), heard.count(READ_EVENT)) == (1, 1), said
