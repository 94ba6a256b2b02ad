"""Entry point of the ``sglang.srt.plugins`` group: SGLang calls ``register`` in each process.

Nothing of SGLang or torch is imported before the versions are known to fit, because an import
error here would be logged by ``load_plugins()`` and the server would start unpatched.
"""

import traceback
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from sglang_dsv4 import __version__
from sglang_dsv4.errors import Dsv4Error, UnsupportedError
from sglang_dsv4.failure import one_sentence, stop

DISTRIBUTION = "sglang_dsv4"


def pin(distribution: str, dependency: str) -> Version:
    """The version of ``dependency`` that the metadata of ``distribution`` pins with ``==``.

    Raises:
        UnsupportedError: ``distribution`` is not installed, or pins no such dependency.
    """
    try:
        lines = requires(distribution) or []
    except PackageNotFoundError as error:
        raise UnsupportedError(
            f"The package {distribution} is not installed, wanted its metadata: run "
            f"`pip install -e .` in the checkout of sglang_dsv4."
        ) from error
    for requirement in map(Requirement, lines):
        if requirement.name != dependency:
            continue
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        for specifier in requirement.specifier:
            if specifier.operator == "==":
                return Version(specifier.version)
    raise UnsupportedError(
        f"The installed {distribution} {version(distribution)} pins no version of {dependency}, "
        f"wanted one: reinstall {distribution}."
    )


def check_versions() -> None:
    """Check the installed SGLang (exactly) and torch (major.minor) against the pins.

    Our metadata pins SGLang; SGLang's pins torch.

    Raises:
        UnsupportedError: one differs or is absent.
    """
    wanted = pin(DISTRIBUTION, "sglang")
    found = _installed("sglang", wanted)
    if Version(found).public != wanted.public:
        raise _wrong_version("sglang", wanted, found)
    torch_wanted = pin("sglang", "torch")
    torch_found = _installed("torch", torch_wanted)
    if Version(torch_found).release[:2] != torch_wanted.release[:2]:
        raise _wrong_version("torch", torch_wanted, torch_found)


def register() -> None:
    """Check versions; register every patch, the attention backend and the overrides. Idempotent.

    Raises:
        SystemExit: with code 2 and one sentence on stderr, when anything does not fit.
    """
    try:
        check_versions()
        _register()
    except Dsv4Error as error:
        stop(one_sentence(error))
    except Exception as error:
        traceback.print_exc()
        stop(
            f"sglang_dsv4 {__version__} could not be registered with sglang: "
            f"{type(error).__name__}: {one_sentence(error)}."
        )


def _register() -> None:
    from sglang_dsv4.patches.registry import register_all

    register_all()

    from sglang_dsv4.attention.backend import register_backend
    from sglang_dsv4.patches.server_args import register_overrides

    register_backend()
    register_overrides()


def _installed(distribution: str, wanted: Version) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        raise _wrong_version(distribution, wanted, "none") from None


def _wrong_version(name: str, wanted: Version, found: str) -> UnsupportedError:
    return UnsupportedError(
        f"sglang_dsv4 {__version__} needs {name} {wanted}, found {found}: "
        f"run `pip install {name}=={wanted}`."
    )
