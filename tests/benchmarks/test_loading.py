import gzip
import io
import tarfile
import zipfile
from pathlib import Path

import datasets
import httpx
import huggingface_hub
import pytest

from harness.benchmarks.loading import load_benchmark
from harness.benchmarks.longbench.tasks import LONGBENCH_E_TASKS, PUBLISHED
from harness.benchmarks.rows import content_hash
from harness.errors import UserError
from tests.benchmarks.longbench.rows import REAL_ROWS, jsonl, load, needs_real_rows, record, write


def benchmark(**changes):
    settings = {
        "source": "local",
        "path": None,
        "revision": None,
        "tasks": ["hotpotqa"],
        "limit": None,
        "on_bad_row": "fail",
        "longbench_e": False,
        "seed": 0,
    }
    return load_benchmark(**settings | changes)


def archive_zip(path, members):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def archive_tar(path, members):
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


@pytest.mark.parametrize(
    ("name", "make"),
    [("d.zip", archive_zip), ("d.tar", archive_tar), ("d.tar.gz", archive_tar)],
    ids=("zip", "tar", "tar.gz"),
)
def test_an_archive_loads_like_a_folder(tmp_path, name, make):
    content = jsonl(record(), record(_id="a2"), end="\r\n")
    write(tmp_path, content)
    path = make(tmp_path / name, {"data/hotpotqa.jsonl": content, "data/hotpotqa_e.jsonl": b""})
    (rows, report), (rows_folder, report_folder) = load(path), load(tmp_path)
    assert rows == rows_folder
    assert report.sha256 == report_folder.sha256
    assert rows[1].where == f"{path}/data/hotpotqa.jsonl:2"


def test_the_unpacked_published_archive_loads(tmp_path):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data", jsonl(record()))
    assert len(load(tmp_path)[0]) == 1


def test_a_damaged_archive_is_named(tmp_path):
    (tmp_path / "a.zip").write_bytes(b"not an archive")
    with pytest.raises(UserError, match=r"a\.zip is neither a folder nor a readable \.zip or \.tar archive"):
        load(tmp_path / "a.zip")
    path = archive_zip(tmp_path / "b.zip", {"hotpotqa.jsonl": jsonl(record())})
    content = bytearray(path.read_bytes())
    content[70] ^= 0xFF
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"b\.zip/hotpotqa\.jsonl cannot be read .*Fetch it again"):
        load(path)


def test_an_archive_must_hold_each_task_once(tmp_path):
    path = archive_zip(tmp_path / "a.zip", {"x/hotpotqa.jsonl": b"", "y/hotpotqa.jsonl": b""})
    with pytest.raises(UserError, match=r"has x/hotpotqa\.jsonl and y/hotpotqa\.jsonl; it must have only one"):
        load(path)
    with pytest.raises(UserError, match=r"looked for qasper\.jsonl in the archive .*it has none"):
        load(path, task="qasper")


@pytest.mark.parametrize("place", ["hotpotqa.parquet", "hotpotqa/test-00000-of-00001.parquet"])
def test_a_parquet_copy_loads_to_the_same_rows(tmp_path, place):
    rows = [record(), record(_id="a2", answers=["a"])]
    write(tmp_path, jsonl(*rows))
    (tmp_path / "copy").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(tmp_path / "copy" / place)
    assert load(tmp_path / "copy")[0] == load(tmp_path)[0]
    (tmp_path / "copy" / place).write_bytes(b"PAR1 broken")
    with pytest.raises(UserError, match="cannot be read as Parquet"):
        load(tmp_path / "copy")


def test_the_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=rf"no rows of hotpotqa: looked for {tmp_path}/hotpotqa\.jsonl"):
        load(tmp_path)
    with pytest.raises(UserError, match=rf"looked for {tmp_path}/hotpotqa_e\.jsonl"):
        load(tmp_path, longbench_e=True)
    with pytest.raises(UserError, match=r"benchmark\.path=.*nowhere does not exist.*longbench_mini"):
        load(tmp_path / "nowhere")


def test_a_compressed_file_is_read_from_a_folder_and_on_its_own(tmp_path):
    (tmp_path / "hotpotqa.jsonl.gz").write_bytes(gzip.compress(jsonl(record(), record(_id="a2"))))
    plain = tmp_path / "plain"
    plain.mkdir()
    expected = load(write(plain, jsonl(record(), record(_id="a2"))).parent)[0]
    assert load(tmp_path)[0] == load(tmp_path / "hotpotqa.jsonl.gz")[0] == expected
    (tmp_path / "hotpotqa.jsonl.gz").write_bytes(gzip.compress(jsonl(record()))[:-9])
    with pytest.raises(UserError, match=r"hotpotqa\.jsonl\.gz cannot be read"):
        load(tmp_path)


def test_a_single_file_names_its_task(tmp_path):
    file = write(tmp_path, jsonl(record()))
    assert list(benchmark(path=str(file), tasks=None, limit=None).reports) == ["hotpotqa"]
    assert load(file)[0] == load(tmp_path)[0]
    with pytest.raises(UserError, match="row of 'hotpotqa', not of 'qasper'"):
        benchmark(path=str(file), tasks=["qasper"])
    other = write(tmp_path, jsonl(record()), "mine")
    assert list(benchmark(path=str(other), tasks=["hotpotqa"]).reports) == ["hotpotqa"]
    with pytest.raises(UserError, match="mine"):
        benchmark(path=str(other), tasks=None)


def test_without_a_network_the_missing_archive_is_told_at_once(monkeypatch):
    monkeypatch.setattr("harness.benchmarks.longbench.sources.cached_file", lambda *_: None)
    monkeypatch.setattr("harness.hub.is_reachable", lambda endpoint: False)
    monkeypatch.setattr("harness.hub.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("asks the network"))
    with pytest.raises(
        UserError, match=r"data\.zip .* is not in the hub's cache, and .*benchmark\.path=FILE_OR_FOLDER"
    ):
        benchmark(source="hub", path=None, tasks=["qasper"])


def test_longbench_e_reads_its_own_files_and_counts(tmp_path):
    write(tmp_path, jsonl(record(dataset="hotpotqa_e"), record(_id="a2")), "hotpotqa_e")
    rows, report = load(tmp_path, longbench_e=True)
    assert [row.task for row in rows] == ["hotpotqa", "hotpotqa"]
    assert report.num_expected == 300


@needs_real_rows
def test_a_benchmark_comes_in_official_order_with_one_report_a_task():
    loaded = benchmark(path=str(REAL_ROWS), tasks=["lcc", "hotpotqa", "trec"], limit=2)
    assert [row.task for row in loaded.rows] == ["hotpotqa"] * 2 + ["trec"] * 2 + ["lcc"] * 2
    assert {name: report.num_rows for name, report in loaded.reports.items()} == {"hotpotqa": 2, "trec": 2, "lcc": 2}
    assert loaded.content_hash == content_hash(loaded.rows)
    assert loaded == benchmark(path=str(REAL_ROWS), tasks=["trec", "lcc", "hotpotqa"], limit=2, source="hub")


def test_no_named_task_means_all_of_longbench():
    every = benchmark(source="mini", tasks=None, limit=1)
    only_e = benchmark(source="mini", tasks=None, limit=1, longbench_e=True)
    assert tuple(every.reports) == tuple(PUBLISHED)
    assert tuple(only_e.reports) == LONGBENCH_E_TASKS


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"source": "web"}, r"benchmark\.source=web must be one of mini, local, hub"),
        ({"on_bad_row": "warn"}, r"benchmark\.on_bad_row=warn must be one of fail, skip"),
        ({"source": "local"}, r"benchmark\.source=local needs benchmark\.path"),
        ({"path": ".", "tasks": []}, r"benchmark\.tasks is empty"),
        ({"path": ".", "tasks": ["qasper", "qasper"]}, r"names qasper more than once"),
        ({"path": ".", "tasks": ["qaspar"]}, r"Did you mean qasper"),
        ({"path": ".", "tasks": ["vcsum"], "longbench_e": True}, r"task vcsum is not in LongBench-E"),
        ({"path": ".", "limit": 0}, r"benchmark\.limit=0 must be at least 1"),
        ({"path": ".", "revision": "main"}, r"benchmark\.revision=main only has an effect"),
        ({"source": "mini", "limit": 1, "path": "."}, r"benchmark\.path=\. has no effect with source=mini"),
        ({"source": "mini"}, r"benchmark\.limit=null: longbench_mini makes as many rows as asked for"),
    ],
    ids=str,
)
def test_settings_that_are_wrong_or_without_effect_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        benchmark(**settings)


@pytest.mark.parametrize(
    "error", [httpx.ConnectError("no network"), FileNotFoundError("not cached"), ValueError("bad")]
)
def test_without_a_network_one_message_says_what_to_do(monkeypatch, error):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr("harness.hub.is_reachable", lambda endpoint: True)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(
        UserError, match=r"data\.zip of the data set zai-org/LongBench \(revision abc\).*benchmark\.path="
    ):
        benchmark(source="hub", revision="abc")


def test_the_hub_archive_is_read_without_a_loader_script(monkeypatch, tmp_path):
    path = archive_zip(tmp_path / "data.zip", {"data/hotpotqa.jsonl": jsonl(record())})
    asked = []
    monkeypatch.setattr("harness.hub.is_reachable", lambda endpoint: True)
    monkeypatch.setattr(
        huggingface_hub, "hf_hub_download", lambda *args, **kwargs: asked.append((args, kwargs)) or str(path)
    )
    assert len(benchmark(source="hub", revision="abc").rows) == 1
    assert asked == [(("zai-org/LongBench", "data.zip"), {"repo_type": "dataset", "revision": "abc"})]


def test_a_home_folder_in_the_path_is_found(monkeypatch, tmp_path):
    write(tmp_path, jsonl(record()))
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert len(benchmark(path="~").rows) == 1
