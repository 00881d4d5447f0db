"""What MkDocs calls while it builds the site (`hooks` in mkdocs.yml).

The READMEs become pages of the site, and every public module gets a reference page. Pages link each other by their
paths in the repository, so that the links also work on a code host; here they are turned into links of the site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"

#: The packages that are no backends, and the backends.
PACKAGES = ("core", "observe", "testkit", "tools", "integrations", "compat")
BACKENDS = ("noop", "recording", "shm_store", "redis_store", "tq_simple", "tq_mooncake")
#: Pages that lie outside of docs/: where each stands in the site.
OUTSIDE = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
    "changelog.md": "CHANGELOG.md",
    "rules.md": "testkit/src/dataplane_testkit/rules.md",
    **{f"packages/{name}.md": f"{name}/README.md" for name in PACKAGES},
    **{f"packages/{name}.md": f"plugins/{name}/README.md" for name in BACKENDS},
    "examples/programs.md": "examples/README.md",
    "examples/grafana.md": "examples/grafana/README.md",
    "examples/trl.md": "examples/trl/README.md",
    "examples/rollout_server.md": "examples/rollout_server/README.md",
    "examples/sqlite.md": "examples/third_party_sqlite/README.md",
}
_PAGE_OF = {ROOT / path: page for page, path in OUTSIDE.items()}
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\((?!\w+:)([^)#\s]+)(#[^)\s]*)?\)")


def public_modules() -> list[str]:
    """The modules that users import from: those of the packages that are no backends, their sub-packages, each
    middleware, and the ledger's commands."""
    names = []
    for source in (ROOT / name / "src" for name in PACKAGES):
        for pattern in ("*.py", "*/__init__.py", "middleware/*.py", "ledger/commands.py"):
            for path in source.glob(f"dataplane_*/{pattern}"):
                names.append(".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__"))
    return sorted({name for name in names if "._" not in name})


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Adds the decisions and the reference to the navigation."""
    decisions = sorted(path.name for path in (DOCS / "decisions").glob("*.md"))
    decisions.sort(key="README.md".__ne__)
    config.nav.append({"Decisions": [f"decisions/{name}" for name in decisions]})
    config.nav.append({"Reference": [{name: f"reference/{name}.md"} for name in public_modules()]})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages from outside of docs/, and those of reference."""
    for page, path in OUTSIDE.items():
        files.append(File.generated(config, page, content=(ROOT / path).read_text(encoding="utf-8")))
    for name in public_modules():
        files.append(File.generated(config, f"reference/{name}.md", content=f"# `{name}`\n\n::: {name}\n"))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Turns links between files of the repository into links between pages; what has no page keeps its words only."""
    here = page.file.src_uri
    folder = (ROOT / OUTSIDE[here] if here in OUTSIDE else DOCS / here).parent

    def carried_over(link: re.Match[str]) -> str:
        text, path, anchor = link.groups(default="")
        target = Path(os.path.normpath(folder / path))
        target = target / "README.md" if target.is_dir() else target
        if not target.exists():
            return link.group()
        if target in _PAGE_OF:
            there = _PAGE_OF[target]
        elif target.is_relative_to(DOCS):
            there = target.relative_to(DOCS).as_posix()
        else:
            return text
        return f"[{text}]({os.path.relpath(there, os.path.dirname(here))}{anchor})"

    return _LINK.sub(carried_over, markdown)
