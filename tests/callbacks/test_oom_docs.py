from __future__ import annotations

import pytest

from tests import oom_docs


@pytest.mark.filterwarnings("ignore")
def test_the_example_in_the_docs_is_what_its_code_writes(tmp_path):
    assert oom_docs.report(tmp_path.resolve()) == oom_docs.EXAMPLE.read_text(encoding="utf-8")
