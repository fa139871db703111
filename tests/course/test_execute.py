"""notebooks/execute.py: one clean run, written whole or not at all, and the index page."""

import json
import re
from pathlib import Path

import pytest
from notebook_chapter import NOTEBOOKS, chapters, execute, index
from toy_notebooks import FACT_TAGS, code, markdown, notebook, write

RECORD = """\
import json, os
assert not os.environ["MINILLM_QUICK"]
with open(os.environ["MINILLM_RESULTS"], "a") as file:
    print(json.dumps({"name": "step", "value": 4.2112, "unit": "ms", "text": "4.21"}), file=file)
"""
PROSE = (
    '# Title\n\n<span data-fact="count">?</span>, <span data-result="step">?</span>, '
    '<span data-given="N">?</span>, <span data-claim="A24">49,109</span>'
)
FILLED = (
    '# Title\n\n<span data-fact="count">1,035</span>, <span data-result="step">4.21</span>, '
    '<span data-given="N">2,048</span>, <span data-claim="A24">49,109</span>'
)
COUNT = code("print('count: 1,035 tokens')", *FACT_TAGS)
PNG = "display({'image/png': b'\\x89PNG'}, raw=True, metadata={'image/png': {'alt': 'A line.'}})"


def run(folder, *arguments, capsys=None):
    """The script's status and what it said."""
    status = chapters.script_errors(lambda: execute.main(["--folder", str(folder), *arguments]))
    said = capsys.readouterr()
    return status, said.out + said.err


def write_unrun(folder, stem, *cells, **about):
    """A chapter as its author saves it before it was ever executed."""
    unrun = [
        cell | {"execution_count": None, "outputs": []} if "outputs" in cell else cell
        for cell in cells
    ]
    return write(folder, stem, *unrun, **about)


@pytest.fixture
def course(tmp_path):
    """A folder with two chapters, of which the second fails."""
    write_unrun(
        tmp_path, "00_good", markdown(PROSE), code("N = 2**11"), COUNT, code(RECORD), code(PNG)
    )
    write_unrun(tmp_path, "01_bad", markdown("# Bad"), COUNT, code("rows = 3\nrows / 0"), COUNT)
    return tmp_path


def test_a_chapter_is_executed_filled_and_its_results_are_kept(course, capsys, monkeypatch):
    monkeypatch.setenv("MINILLM_QUICK", "1")  # published numbers are never measured in a hurry
    status, said = run(course, "00", capsys=capsys)
    assert status == 0, said
    assert re.search(r"00_good: \d+\.\d s in 4 cells", said)
    made = chapters.read_notebook(course / "00_good.ipynb")
    assert made["cells"][0]["source"] == FILLED
    assert [cell["execution_count"] for _, cell in chapters.code_cells(made)] == [1, 2, 3, 4]
    assert chapters.facts(made) == {"count": "1,035"}
    assert made["metadata"]["language_info"] == {"name": "python"}
    results = json.loads((course / "results" / "00_good.json").read_text())
    assert results["values"] == {"step": {"value": 4.2112, "unit": "ms", "text": "4.21"}}
    assert (results["chapter"], results["machine"]["cores"] >= 1) == ("00", True)
    assert (course / "README.md").exists()


@pytest.mark.slow
def test_a_failing_cell_is_shown_and_the_file_is_left_as_it_was(course, capsys):
    before = (course / "01_bad.ipynb").read_bytes()
    status, said = run(course, "01", capsys=capsys)
    assert status == 1
    assert "01_bad.ipynb was left as it is. Cell 2 failed:\n    rows = 3\n    rows / 0" in said
    assert "ZeroDivisionError: division by zero" in said
    assert "Traceback (most recent" not in said.split("ZeroDivisionError: division")[1]
    assert (course / "01_bad.ipynb").read_bytes() == before
    assert not (course / "results").exists()


def test_check_writes_nothing_and_names_the_fact_that_changed(tmp_path, capsys):
    stale = code("print('count: 1,035 tokens')", *FACT_TAGS, says="count: 1,000 tokens\n")
    path = write(tmp_path, "00_stale", markdown("# Title"), stale)
    before = path.read_bytes()
    status, said = run(tmp_path, "--check", capsys=capsys)
    assert status == 1
    assert "the fact 'count' is committed as 1,000, and now it is 1,035" in said
    assert path.read_bytes() == before
    assert sorted(tmp_path.iterdir()) == [path]


def test_fill_binds_the_prose_without_a_kernel(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(execute, "run", lambda *_, **__: pytest.fail("started a kernel"))
    cell = COUNT | code("print()", *FACT_TAGS, says="count: 1,035 tokens\n")
    path = write(tmp_path, "00_x", markdown(PROSE.replace('"step"', '"slow"')), cell)
    status, said = run(tmp_path, "--fill", capsys=capsys)
    assert status == 1
    assert 'data-result="slow": no cell record()s it' in said
    assert 'data-given="N": no code cell assigns it one constant' in said
    text = chapters.read_notebook(path)["cells"][0]["source"]
    assert '<span data-fact="count">1,035</span>' in text
    assert '<span data-given="N">?</span>' in text


def test_normalising_drops_what_is_chance_and_reports_warnings():
    widget = {"application/vnd.jupyter.widget-view+json": {"model_id": "1"}, "text/plain": "HBox()"}
    outputs = (
        {"output_type": "stream", "name": "stdout", "text": "a"},
        {"output_type": "stream", "name": "stdout", "text": "b\n"},
        {"output_type": "display_data", "data": widget, "metadata": {}},
        {"output_type": "stream", "name": "stderr", "text": "UserWarning: old\n"},
    )
    made = notebook(code("x", "repeats", outputs=outputs))
    made["cells"][0]["metadata"]["execution"] = {"iopub.execute_input": "2026"}
    made["metadata"] |= {"widgets": {}, "language_info": {"name": "python", "version": "3.11.7"}}
    (problem,) = execute.normalise(made)
    assert problem == "cell 0 wrote to stderr, remove the cause: UserWarning: old"
    assert made["cells"][0]["outputs"] == [outputs[0] | {"text": "ab\n"}]
    assert made["cells"][0]["metadata"] == dict(tags=["repeats"], jupyter={"outputs_hidden": True})
    assert made["metadata"].keys() == {"kernelspec", "language_info", "minillm"}
    assert made["metadata"]["language_info"] == {"name": "python"}


def test_a_kernel_runs_apart_from_the_person_who_starts_it(tmp_path, monkeypatch):
    for name in ("PYTHONSTARTUP", "MINILLM_RESULTS", "MINILLM_WORK"):
        monkeypatch.setenv(name, "mine")
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.delenv("OMP_NUM_THREADS")
    env = chapters.environment(tmp_path, 2, MINILLM_QUICK="1")
    assert not {"PYTHONSTARTUP", "MPLBACKEND", "MINILLM_RESULTS"} & env.keys()
    assert (env["MINILLM_QUICK"], env["OMP_NUM_THREADS"]) == ("1", "2")
    places = {env[name] for name in ("MINILLM_WORK", "XDG_CACHE_HOME", "IPYTHONDIR")}
    assert len(places) == 3
    assert all(place.startswith(str(tmp_path)) for place in places)
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert chapters.environment(tmp_path, 2)["OMP_NUM_THREADS"] == "7"


def test_a_kernel_has_copies_of_the_libraries_that_were_built(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    usual = tmp_path / "mine" / "minillm"
    usual.mkdir(parents=True)
    for name in ("bf16-1.so", "hardware.json"):
        (usual / name).write_text("mine", encoding="utf-8")
    own = Path(chapters.environment(tmp_path)["XDG_CACHE_HOME"]) / "minillm"
    for quick, lent in (("", []), ("", []), ("1", ["hardware.json"])):  # again, and in a hurry
        monkeypatch.setenv("MINILLM_QUICK", quick)
        chapters.lend_libraries(tmp_path)
        assert {file.name for file in own.iterdir()} == {"bf16-1.so", *lent}
    (own / "bf16-1.so").write_text("the kernel's", encoding="utf-8")
    assert (usual / "bf16-1.so").read_text(encoding="utf-8") == "mine"


def test_the_committed_index_is_the_generated_one():
    for path, content in index.files(NOTEBOOKS).items():
        assert path.exists() and path.read_bytes() == content, (  # noqa: PT018
            f"notebooks/{path.relative_to(NOTEBOOKS)} is not what the chapters say: "
            f"run python notebooks/execute.py --index"
        )
