"""``beamline data prepare``: the files that it writes, byte for byte, and what it says when it cannot."""

import hashlib
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from beamline.config.schema import FileSource
from beamline.data import DataError, load
from beamline.data.hub import KNOWN
from beamline.data.prepare import Raw, find, prepare
from beamline.data.wording import AFTER, BEFORE
from tests.faults import disk_full, failing_operation

NAMES = ["data_source", "prompt", "ability", "reward_model", "extra_info"]


def dapo_rows(distinct: int, repeats: int) -> list[dict[str, Any]]:
    """Rows like DAPO's: each problem many times, in any order, the last two problems with two answers."""
    rows = [
        {
            "data_source": "math_dapo",
            "prompt": [{"content": f"{BEFORE}\n\nProblem {n}\n\n{AFTER}", "role": "user"}],
            "ability": "MATH",
            "reward_model": {"ground_truth": str(n + (n >= distinct - 2) * (repeat % 2)), "style": "rule"},
            "extra_info": {"index": f"{repeat}-{n}"},
        }
        for repeat in range(repeats)
        for n in range(distinct)
    ]
    random.Random(0).shuffle(rows)
    return rows


def dapo_file(folder: Path, distinct: int = 50, repeats: int = 6) -> Path:
    path = folder / "raw.parquet"
    pl.DataFrame(dapo_rows(distinct, repeats)).write_parquet(path, row_group_size=64)
    return path


def json_lines(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(*arguments: str | Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "beamline", "data", "prepare", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})


def test_the_command_writes_the_clean_file_and_its_manifest(tmp_path: Path) -> None:
    raw = dapo_file(tmp_path)
    ended = run("dapo", "--from", raw, "--out", tmp_path / "out")
    assert ended.returncode == 0, ended.stderr
    file, manifest_file = (
        tmp_path / "out" / f"dapo-math-17k-cleaned.{suffix}" for suffix in ("parquet", "manifest.json")
    )
    assert str(file) in ended.stdout
    assert [line.split()[-2] for line in ended.stdout.splitlines() if "│" in line] == ["300", "248", "4", "0", "48"]
    frame = pl.read_parquet(file)
    assert (frame.columns, len(frame)) == (NAMES, 48)
    assert frame["extra_info"].struct["index"].dtype == pl.String
    manifest = json.loads(manifest_file.read_bytes())
    assert manifest["source"]["sha256"] == hashlib.sha256(raw.read_bytes()).hexdigest()
    assert manifest["output"]["sha256"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert (manifest["source"]["file"], manifest["output"]["file"]) == (raw.name, file.name)
    rows = manifest["rows"]
    assert (rows["in"], rows["exact_duplicates"], rows["out"]) == (300, 248, 48)
    assert (rows["conflicting_answers"]["rows"], rows["conflicting_answers"]["prompts"]) == (4, 2)
    assert {example["prompt"] for example in rows["conflicting_answers"]["examples"]} == {"Problem 48", "Problem 49"}


def test_the_order_is_that_of_first_appearance_with_the_information_that_stood_there(tmp_path: Path) -> None:
    rows = dapo_rows(50, 6)
    prepared = prepare(find("dapo", tmp_path, dapo_file(tmp_path)), tmp_path)
    first: dict[str, Any] = {}
    for row in rows:
        first.setdefault(row["prompt"][0]["content"], row)
    kept = [row for text, row in first.items() if "Problem 48" not in text and "Problem 49" not in text]
    assert pl.read_parquet(prepared.file).to_dicts() == kept


def test_the_bytes_are_the_same_again_and_on_any_number_of_threads(tmp_path: Path) -> None:
    raw = dapo_file(tmp_path)
    for threads in ("1", "2"):
        ended = run("dapo", "--from", raw, "--out", tmp_path / threads, POLARS_MAX_THREADS=threads)
        assert ended.returncode == 0, ended.stderr
    prepare(find("dapo", tmp_path, raw), tmp_path / "here")
    for name in ("dapo-math-17k-cleaned.parquet", "dapo-math-17k-cleaned.manifest.json"):
        one, two, here = ((tmp_path / folder / name).read_bytes() for folder in ("1", "2", "here"))
        assert one == two == here
        prepare(find("dapo", tmp_path, raw), tmp_path / "here")
        assert (tmp_path / "here" / name).read_bytes() == here


def test_a_repeated_evaluation_set_is_left_with_its_problems(tmp_path: Path) -> None:
    raw = dapo_file(tmp_path, distinct=32, repeats=32)
    prepared = prepare(find("aime-2024", tmp_path, raw), tmp_path)
    assert prepared.file.name == "aime-2024-cleaned.parquet"
    assert (prepared.manifest["rows"]["in"], prepared.manifest["rows"]["out"]) == (1024, 30)


AIME = [{"prompt": [{"role": "user", "content": f"Problem {n}"}], "label": str(n)} for n in range(30)]


def test_messages_and_labels_become_the_columns_of_dapo(tmp_path: Path) -> None:
    raw = json_lines(tmp_path / "aime-2025.jsonl", *AIME)
    frame = pl.read_parquet(prepare(find("aime-2025", tmp_path, raw), tmp_path).file)
    assert frame.columns == NAMES
    assert frame.row(3, named=True) == {
        "data_source": "aime-2025",
        "prompt": [{"content": "Problem 3", "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "3", "style": "rule"},
        "extra_info": {"index": "4"},
    }


def test_the_wording_is_put_around_only_when_asked(tmp_path: Path) -> None:
    raw = json_lines(tmp_path / "raw.jsonl", *AIME)
    ended = run(raw, "--out", tmp_path, "--wording", "dapo")
    assert ended.returncode == 0, ended.stderr
    prompts = pl.read_parquet(tmp_path / "raw-cleaned.parquet")["prompt"].to_list()
    assert prompts[3][0]["content"] == f"{BEFORE}\n\nProblem 3\n\n{AFTER}"
    assert json.loads((tmp_path / "raw-cleaned.manifest.json").read_text())["wording"] == "dapo"


def test_a_file_of_ones_own_in_any_format_gives_the_same_table(tmp_path: Path) -> None:
    tables = []
    for suffix in ("jsonl", "json", "csv", "parquet"):
        path = tmp_path / f"own.{suffix}"
        frame = pl.DataFrame({"id": ["a", "b", "b"], "question": ["1+1", "2+2", "2+2"], "answer": ["2", "4", "4"]})
        if suffix == "jsonl":
            frame.write_ndjson(path)
        elif suffix == "json":
            frame.write_json(path)
        elif suffix == "csv":
            frame.write_csv(path)
        else:
            frame.write_parquet(path)
        prepared = prepare(find(str(path), tmp_path), tmp_path)
        assert prepared.file.name == "own-cleaned.parquet"
        tables.append(pl.read_parquet(prepared.file).to_dicts())
    assert tables[0] == tables[1] == tables[2] == tables[3]
    assert [row["extra_info"] for row in tables[0]] == [{"index": "a"}, {"index": "b"}]
    assert {row["data_source"] for row in tables[0]} == {"own"}


def test_what_was_prepared_is_read_with_its_ids(tmp_path: Path) -> None:
    prepared = prepare(find("dapo", tmp_path, dapo_file(tmp_path)), tmp_path)
    problems = load("train", FileSource(path=prepared.file), 0, "train")
    assert (len(problems), problems.excluded) == (48, ())
    assert problems.problems[0].id == pl.read_parquet(prepared.file)["extra_info"][0]["index"]
    again = prepare(find(str(prepared.file), tmp_path), tmp_path)
    assert again.file.read_bytes() == prepared.file.read_bytes()


def test_rows_that_cannot_be_used_are_listed(tmp_path: Path) -> None:
    raw = json_lines(tmp_path / "raw.jsonl", *AIME[:2], {"prompt": "[/bold]", "label": None}, "text")
    ended = run(raw, "--out", tmp_path)
    assert "left out    line 3: 'label' must be text or a number, not None" in ended.stdout
    assert "left out    line 4: a str, not an object" in ended.stdout


def test_nothing_left_is_an_error_with_the_first_reason_and_no_file(tmp_path: Path) -> None:
    raw = json_lines(tmp_path / "raw.jsonl", {"text": "1"})
    ended = run(raw, "--out", tmp_path / "out")
    assert ended.returncode == 1
    assert f"nothing is left of the 1 rows of {raw}; line 1: no problem" in ended.stderr.replace("\n", "")
    assert not (tmp_path / "out").exists()
    empty = json_lines(tmp_path / "empty.jsonl")
    with pytest.raises(DataError, match="nothing is left of the 0 rows"):
        prepare(find(str(empty), tmp_path), tmp_path)


def test_a_damaged_table_is_an_error_that_names_it(tmp_path: Path) -> None:
    raw = dapo_file(tmp_path)
    raw.write_bytes(raw.read_bytes()[:-9])
    ended = run("dapo", "--from", raw, "--out", tmp_path / "out")
    assert ended.returncode == 1
    assert ended.stderr.startswith("DataError: ")
    assert str(raw) in ended.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dap",), "'dap' is neither a file nor a known data set (dapo, aime-2024, aime-2025)"),
        (("own.jsonl", "--from", "raw.jsonl"), "--from names the raw file of dapo, aime-2024, aime-2025; 'own.jsonl'"),
    ],
)
def test_a_source_that_is_none(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    source, *rest = arguments
    with pytest.raises(DataError) as caught:
        find(source, tmp_path, Path(rest[-1]) if rest else None)
    assert message in str(caught.value)


def test_without_a_network_the_error_says_what_to_download_and_how_to_go_on(tmp_path: Path) -> None:
    ended = run("aime-2025", "--out", tmp_path / "out", "--wording", "dapo", HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path))
    assert ended.returncode == 1
    assert "cannot fetch aime-2025.jsonl of the data set zhuzilin/aime-2025" in ended.stderr
    assert "hf download --repo-type dataset zhuzilin/aime-2025 aime-2025.jsonl --local-dir ." in ended.stderr
    again = f"beamline data prepare aime-2025 --out {tmp_path / 'out'} --wording dapo --from aime-2025.jsonl"
    assert again in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_known_set_is_fetched_from_its_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repository: str, file: str, repo_type: str) -> str:
        asked.append((repository, file, repo_type))
        return str(tmp_path / "cached")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    raws = [find(name, tmp_path) for name in KNOWN]
    assert [raw.stem for raw in raws] == ["dapo-math-17k", "aime-2024", "aime-2025"]
    assert {raw.file for raw in raws} == {tmp_path / "cached"}
    assert asked[0] == ("BytedTsinghua-SIA/DAPO-Math-17k", "data/dapo-math-17k.parquet", "dataset")


def test_a_full_disk_leaves_the_old_files_or_the_new_ones(tmp_path: Path) -> None:
    raw, out = dapo_file(tmp_path), tmp_path / "out"
    old = prepare(Raw(raw, "set", "set"), out)
    before = {path: path.read_bytes() for path in (old.file, old.manifest_file)}
    pl.DataFrame(dapo_rows(50, 6)[:100]).write_parquet(raw)
    prepare(Raw(raw, "set", "set"), tmp_path / "other")
    after = {path: (tmp_path / "other" / path.name).read_bytes() for path in before}
    with failing_operation() as disk:
        prepare(Raw(raw, "set", "set"), out)
    for n in range(1, disk.performed + 1):
        for path, content in before.items():
            path.write_bytes(content)
        with pytest.raises(OSError, match="No space left"), failing_operation(n, disk_full()):
            prepare(Raw(raw, "set", "set"), out)
        assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in before)
        assert all(path.read_bytes() in (before[path], after[path]) for path in before)
