"""The README and docs/: examples run, on one process and on two ranks, and print what stands below them.

Blocks ``python`` of a page run in order, in one namespace. A block ``text`` right after one is what it prints. Blocks
``py`` are lines of a script in launch/; ``python3`` is not run: it needs what is not installed here, or shows a
mistake.
"""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

import pytest

import distprune
import distprune.jobs
from distprune.jobs import BareJob
from distprune.jobs.options import options_of
from tests.contract import support_table
from tests.hf_models import make_model, make_tokenizer
from tests.started import run_script
from tests.training.optimizers import optimizer_table

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [README, *sorted(DOCS.rglob("*.md"))]
FLAGS = re.DOTALL | re.MULTILINE
EXAMPLE = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", FLAGS)
LINES = runpy.run_path(str(DOCS / "lines.py"))
COMMANDS = re.findall(r"^```{command} (\w+)$", (DOCS / "reference" / "command_line.md").read_text(), re.MULTILINE)
SCRIPTS = {line for path in ROOT.glob("launch/*.*") for line in path.read_text().splitlines()}

# Runs the examples of each page in a namespace of its own, and writes what each printed. A process makes one group.
RUNNER = """
import contextlib, io, json, os, sys, time
import torch.distributed as dist

init_process_group, destroy_process_group = dist.init_process_group, dist.destroy_process_group
dist.init_process_group = lambda: dist.is_initialized() or init_process_group()
dist.destroy_process_group = lambda: None
with open(sys.argv[1]) as file:
    pages = json.load(file)
printed = {}
for page, examples in pages.items():
    namespace, printed[page] = {"__name__": "__main__"}, []
    for number, example in enumerate(examples):
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(example, f"{page}, example {number}", "exec"), namespace)
        printed[page].append(output.getvalue())
with open(os.environ.get("RANK", "alone") + ".json", "w") as file:
    json.dump(printed, file)
if dist.is_initialized():
    destroy_process_group()
"""


def examples(page: Path) -> list[tuple[str, str]]:
    """Return the examples of a page, each with what it prints, or nothing where the page does not say."""
    return EXAMPLE.findall(page.read_text())


def without_times(text: str) -> str:
    """Return ``text`` without seconds and what follows them: rounds and bytes, of which one rank has none."""
    return re.sub(r"in [\d.]+ s\b.*$", "in some time", text, flags=re.MULTILINE)


@pytest.mark.launcher
@pytest.mark.parametrize("num_ranks", [0, 2])
def test_examples(num_ranks: int, tmp_path: Path) -> None:
    model = tmp_path / "build" / "demo" / "smollm2-135m"  # a small one in the place of the demo's
    make_model(model)
    make_tokenizer(model)
    pages = {str(page.relative_to(ROOT)): examples(page) for page in PAGES}
    (tmp_path / "pages.json").write_text(json.dumps({page: [code for code, _ in of] for page, of in pages.items()}))
    (tmp_path / "runner.py").write_text(RUNNER)
    run_script(num_ranks, tmp_path, "runner.py", "pages.json")
    wrong = []
    for rank in range(num_ranks) or ["alone"]:
        printed = json.loads((tmp_path / f"{rank}.json").read_text())
        for page, of in pages.items():
            for number, ((_, said), text) in enumerate(zip(of, printed[page], strict=True)):
                is_silent = rank == 1 and not text  # some print on the first rank alone
                if said and not is_silent and without_times(text) != without_times(said):
                    wrong.append(f"{page}, example {number}, rank {rank}:\n{text}")
    assert not wrong, "\n".join(wrong)


def test_what_begins_a_process_group_ends_it() -> None:
    """Otherwise the interpreter may stop gloo's threads at its end, which aborts the process."""
    scripts = {path: path.read_text() for path in ROOT.glob("launch/*.py")}
    code = {page: "".join(of for of, _ in examples(page)) for page in (*PAGES, ROOT / "PYPI.md")} | scripts
    begin = {path: of for path, of in code.items() if "init_process_group()" in of}
    assert len(begin) > 15
    assert [path for path, of in begin.items() if not of.endswith(".destroy_process_group()\n")] == []


def test_excerpts_are_the_scripts() -> None:
    excerpts = [
        line
        for page in PAGES
        for of in re.findall(r"^```py\n(.*?)^```", page.read_text(), FLAGS)
        for line in of.splitlines()
    ]
    assert excerpts
    assert [line for line in excerpts if line not in SCRIPTS] == []


def test_tables_are_the_contracts() -> None:
    page = (DOCS / "reference" / "support.md").read_text()
    assert support_table() in page
    assert optimizer_table() in page


def test_files_that_are_named_are_there() -> None:
    named = [(page, link) for page in PAGES for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())]
    assert [
        (page, link) for page, link in named if not link.startswith("https:") and not (page.parent / link).exists()
    ] == []


def test_every_name_stands_in_the_reference() -> None:
    page = (DOCS / "reference" / "api.md").read_text()
    names = dict[str, list[str]]()
    for module, listed in re.findall(r"^```{names} (\S+)\n(.*?)^```", page, FLAGS):
        names.setdefault(module, []).extend(listed.split())
    assert sorted(names["distprune"]) == sorted(name for name in distprune.__all__ if not name.startswith("__"))
    assert set(names["distprune.jobs"]) <= set(distprune.jobs.__all__)


def options_in_the_reference(command: str) -> set[str]:
    lines = [line for line in LINES["command_lines"](command) if line.startswith(".. option:: --")]
    return {flag.split()[0] for line in lines for flag in line.removeprefix(".. option:: ").split(", ")}


def test_every_option_stands_in_the_reference() -> None:
    found = set().union(*map(options_in_the_reference, COMMANDS))
    jobs = [of for of in vars(distprune.jobs).values() if isinstance(of, type) and issubclass(of, BareJob)]
    flags = {option.flag for job in jobs for name, option in options_of(job).items() if name != "model"}
    assert flags - found == set()


def test_options_in_examples_are_there() -> None:
    """Each command of a ``bash`` block is one of ours with options of its own."""
    number = 0
    for page in PAGES:
        for block in re.findall(r"^```bash\n(.*?)^```", page.read_text(), FLAGS):
            for command, words in re.findall(r"distprune (\w+)(.*)", block.replace("\\\n", " ")):
                if command in COMMANDS:
                    given = set(re.findall(r"(?<!\S)--[a-z-]+", words.partition("#")[0]))
                    assert given <= options_in_the_reference(command), (page, given)
                    number += 1
    assert number > 8


def test_pypi_shows_no_link_that_leads_nowhere() -> None:
    """What the README shows first, in the same words, without links between files."""
    text = (ROOT / "PYPI.md").read_text()
    assert "](" not in text
    assert examples(ROOT / "PYPI.md") == examples(README)[:1]
    lines = README.read_text().splitlines()
    assert [line for line in text.partition("`pip install")[0].splitlines() if line not in lines] == []


def test_the_changelog_has_its_sections_in_order() -> None:
    order = ["Added", "Changed", "Fixed", "Removed"]
    versions = re.split(r"^## .*\n", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    for version in versions:
        sections = re.findall(r"^### (\w+)$", version, re.MULTILINE)
        assert sections == [section for section in order if section in sections]


def test_the_readme_is_a_door() -> None:
    text = README.read_text()
    assert (len(text.splitlines()) <= 150, len(text.split()) <= 1200) == (True, True)


def test_pages_say_what_they_are_for() -> None:
    """A page is a title, then what its reader can do afterwards."""
    starts = {page: page.read_text().split("\n")[2] for page in PAGES if page not in (README, DOCS / "index.md")}
    assert [page for page, line in starts.items() if not line.startswith(("After this page ", "Look up "))] == []
