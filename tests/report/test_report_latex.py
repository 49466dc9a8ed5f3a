"""Every LaTeX table fits a two-column page: compiled where a TeX is at hand, else its width is checked by its text."""

import re
import shutil
import subprocess

import pytest

from harness.report.__main__ import main
from tests.report.synthetic import bench_rows, write_bench, write_run

TASKS = (
    *(
        "narrativeqa",
        "qasper",
        "multifieldqa_en",
        "hotpotqa",
        "2wikimqa",
        "musique",
        "gov_report",
        "qmsum",
        "multi_news",
    ),
    *("trec", "triviaqa", "samsum", "passage_count", "passage_retrieval_en", "lcc", "repobench-p"),
)
MAX_CAPTION_WORDS = 25
DOCUMENT = r"""\documentclass[twocolumn]{article}
\usepackage{booktabs,graphicx}
\usepackage[T1]{fontenc}
\begin{document}
%s
\end{document}
"""


@pytest.fixture(scope="module")
def tables(tmp_path_factory):
    parent = tmp_path_factory.mktemp("runs")
    write_run(parent, tasks=TASKS, num_rows=10, benchmark={"source": "local"})
    for policy in ("streaming_llm", "paged_eviction_literal"):
        write_run(parent, policy, 256, tasks=TASKS, num_rows=10, benchmark={"source": "local"})
    write_bench(parent, bench_rows())
    out = tmp_path_factory.mktemp("report")
    assert main([str(parent), "--out", str(out), "--samples-per-task", "0"]) == 0
    return sorted((out / "tables").glob("*.tex"))


def test_captions_are_short_and_wide_tables_shrink_to_the_page(tables):
    assert {path.stem.split("-")[0] for path in tables} >= {"papers", "longbench", "answer", "published", "difference"}
    for path in tables:
        text = path.read_text(encoding="utf-8")
        assert len(re.findall(r"\\caption\{(.*)\}", text)[0].split()) <= MAX_CAPTION_WORDS, path.stem
        assert text.count(r"\resizebox{\ifdim\width>\linewidth\linewidth\else\width\fi}{!}") == text.count(r"\caption")
        columns = len(re.search(r"\\begin\{tabular\}\{@\{\}([lr]+)@\{\}\}", text).group(1))
        assert (r"\begin{table*}" in text) == (columns > 5), path.stem


@pytest.mark.skipif(shutil.which("pdflatex") is None, reason="needs pdflatex")
def test_every_table_compiles_without_an_overfull_box(tables, tmp_path):
    content = "\n\\clearpage\n".join(path.read_text(encoding="utf-8") for path in tables)
    (tmp_path / "all.tex").write_text(DOCUMENT % content, encoding="utf-8")
    command = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "all.tex"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, errors="replace")
    assert done.returncode == 0, done.stdout[-1500:]
    overfull = [float(points) for points in re.findall(r"Overfull \\hbox \(([\d.]+)pt too wide\)", done.stdout)]
    assert max(overfull, default=0.0) < 1.0, overfull
    assert not re.findall(r"Overfull \\vbox|Float too large", done.stdout)
