"""Save a tree to a folder, so that at every moment the folder holds a whole checkpoint: the old one or the new one.

Data goes to files with new names. When all are flushed, the rename of `manifest.json` commits. Then the files that the
new manifest does not name are removed. The first member locks the folder; the system frees the lock when its process
ends. So if the lock is free, files that the manifest does not name are those of a save that was broken off.
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from spmd.array import PartitionedArray
from spmd.errors import CheckpointError
from spmd.io.agreement import Contents
from spmd.io.boxes import is_within, slices_within
from spmd.io.files import Lock, flush_folder, make_folder_for, remove, rename, replace_file, write_file
from spmd.io.manifest import FORMAT, MANIFEST, FileEntry, Manifest
from spmd.io.members import Members, members_of
from spmd.io.trees import map_leaves
from spmd.io.writing import array_entries, plan_of, write_files
from spmd.layout import Box
from spmd.mesh import Mesh
from spmd.tracebacks import api_boundary

__all__ = ["LOCK", "Save", "is_foreign", "is_of_save", "meshes_in", "save"]

LOCK = "save.lock"
_OURS = re.compile(r"(data|part|probe|new)-[0-9a-f]{16}(-.*)?(\.safetensors|\.json)?")
"""The names of the files that a save makes besides the manifest and the lock."""


def is_of_save(name: str) -> bool:
    """Whether a file without a manifest that names it may be what a save has left."""
    return name == LOCK or _OURS.fullmatch(name) is not None


@api_boundary
def save(path: str | os.PathLike[str], tree: Any, *, metadata: Any = None) -> None:
    """Save a tree to the folder `path`, from which `spmd.load` loads it onto any mesh. Collective.

    tree: a pytree of `PartitionedArray`s, arrays of NumPy, CuPy and PyTorch, `spt.Parameter`s, numbers, strings, bytes
    and None, and of objects with a state: modules, optimisers and generators of PyTorch, learning-rate schedulers,
    samplers, random generators of NumPy. In bodies, blocks of PyTorch and what is equal on all workers.
    metadata: anything that JSON can hold, for `spmd.io.inspect`.

    Each block is written once, by a process that holds it; of what several hold each writes a part. Sums of unreduced
    arrays are taken first. If the program is killed, or the disk is full, the folder keeps the checkpoint that it had.
    The rename of a file commits when everything has been flushed to the disk (SPMD_FSYNC=0: without flushing).

    Needs memory of a few MiB besides the tree. Cost: four small messages to all. docs/how_to/saving.md.
    docs/reference/checkpoint_format.md is the format: a folder of safetensors files and a manifest with checksums.
    Raises CheckpointError on all processes: for a leaf that cannot be saved, with its name; if bare arrays or numbers
    differ between processes; if not all processes see the folder; if another save to it is going on; and for the errors
    of the system, such as a full disk.

        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder, spmd.Mesh(model=2):
        ...     spmd.save(folder, {"w": spmd.arange(4.0, spec=P("model")), "epoch": 7}, metadata={"code": "a1b2c3"})
        ...     spmd.load(folder)
        {'w': array([0., 1., 2., 3.]), 'epoch': 7}
    """
    members = members_of("spmd.save", meshes_in(tree))
    saving = Save(path, tree, metadata, members)
    saving.run(saving.commit)


def meshes_in(tree: Any) -> list[Mesh]:
    """The meshes of the global arrays of a tree."""
    meshes: list[Mesh] = []
    map_leaves(tree, lambda _, x: meshes.append(x.mesh) if type(x) is PartitionedArray else None)
    return list(dict.fromkeys(meshes))


class Save:
    """One save: everything is known and agreed upon, and nothing is written yet.

    What follows is `write` by every member, or `abandon` if one of them fails; when all have written, `commit` by every
    member, of which the first does something; `clean` if it fails; and `release`. None of these communicates. `run`
    does it all, and is collective.
    """

    def __init__(self, path: str | os.PathLike[str], tree: Any, metadata: Any, members: Members):
        self.members = members
        self.metadata = metadata
        self._lock: Lock | None = None
        self._is_renaming = False
        self._copies: dict[str, dict[Box, np.ndarray]] = {}
        agreed = members.together(partial(self._begin, path, tree), self.clean)
        try:
            self.contents.agree(agreed)
            self.tree, self.sources = self.contents.tree, self.contents.sources
        except BaseException:
            self.clean()
            raise
        self.id = agreed[0]["id"]
        members.together(partial(self._see_probe, agreed[0]["folder"]), self.clean)
        self.plan = plan_of(self.id, self.sources, members.size)

    def _begin(self, path: str | os.PathLike[str], tree: Any) -> dict[str, Any]:
        """What must be equal on all members, and the id of the save from the first one, which locks the folder."""
        where = self.members.where
        if not os.fspath(path):
            raise CheckpointError.at(
                where, argument="path", got=repr(path), need="the name of a folder", mend="'run/7'"
            )
        self.folder = Path(os.path.abspath(os.fspath(path)))
        try:
            json.dumps(self.metadata, allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError.at(
                where,
                argument="metadata",
                got=str(error),
                need="what JSON can hold",
                mend="str(x); arrays go into tree",
            ) from None
        self.contents = Contents(tree, self.members, {"metadata": self.metadata})
        own = self.contents.digests()
        if not self.members.is_first:
            return own
        id = secrets.token_hex(8)
        make_folder_for(where, self.folder)
        _check_not_foreign(where, self.folder / MANIFEST)
        self._lock = Lock(self.folder / LOCK)
        remove_unnamed(self.folder)
        if self.members.size > 1:
            write_file(self.folder / f"probe-{id}", b"")
        return own | {"id": id, "folder": str(self.folder)}

    def _see_probe(self, first: str) -> None:
        """Raise if this member does not see what the first has made in its folder."""
        probe = self.folder / f"probe-{self.id}"
        if self.members.size > 1 and not probe.exists():
            here, who = str(self.folder), self.members.describe(0)
            raise CheckpointError.at(
                self.members.where,
                argument="path",
                got=f"{here}, which {who} made and this one does not see"
                if here == first
                else f"{here}, and {first} on {who}",
                need="a folder on a file system that all hosts share",
                mend="save to such a file system, by an absolute path",
            )

    def run(self, commit: Callable[[], None]) -> None:
        """Write and commit, together with the other members. commit: `commit`, and what else goes with it."""
        try:
            self.members.together(self.write, self.abandon)
            self.members.together(commit, self.clean)
        finally:
            self.release()

    def copy_blocks(self) -> None:
        """Copy what this member writes: from now on the arrays of the tree may change."""
        for _, pieces in self.plan.of_member(self.members.own):
            for piece in pieces:
                block = np.array(self.sources[piece.name].block(piece.box))
                self._copies.setdefault(piece.name, {})[piece.box] = block
        for name, source in self.sources.items():
            source.block = partial(self._copy_of, name)

    def _copy_of(self, name: str, box: Box) -> np.ndarray:
        copies = self._copies[name]
        around = next(own for own in copies if is_within(box, own))
        return copies[around][slices_within(box, around)]

    def write(self) -> None:
        """Write and flush this member's files, and a list of them with their checksums."""
        try:
            entries = write_files(self.folder, self.plan, self.members.own, self.sources)
        finally:
            self._copies = {}  # a save in the background may be waited for only much later
        text = json.dumps([list(e) for e in entries]).encode()
        replace_file(self._part(self.members.own), text, f"new-{self.id}-{self.members.own:05d}.json")

    def _part(self, member: int) -> Path:
        return self.folder / f"part-{self.id}-{member:05d}.json"

    def has_part(self, member: int) -> bool:
        """Whether a member has written its files."""
        return self._part(member).exists()

    def commit(self) -> None:
        """By the first member, when all have written: replace the manifest, and remove what it does not name."""
        if not self.members.is_first:
            return
        parts = [json.loads(self._part(m).read_bytes()) for m in range(self.members.size)]
        files = [FileEntry(*entry) for entries in parts for entry in entries]
        created = datetime.now(UTC).isoformat(timespec="seconds")
        arrays = array_entries(self.plan, self.sources)
        manifest = Manifest(self.id, self.tree, arrays, files, self.metadata, created)
        new = self.folder / f"new-{self.id}.json"
        write_file(new, manifest.to_bytes())
        self._is_renaming = True
        rename(new, self.folder / MANIFEST)
        self._is_renaming = False
        self.clean()

    def clean(self) -> None:
        """By the first member: remove every file that the manifest does not name, whichever manifest that is.

        If the rename has failed, both manifests keep their files: a crash of the system could bring either back.
        """
        try:
            if self._lock is not None and not self._is_renaming:
                remove_unnamed(self.folder)
        finally:
            self.release()

    def abandon(self) -> None:
        """Before any member commits: remove what this member has written."""
        names = [name for name, _ in self.plan.of_member(self.members.own)]
        remove([*(self.folder / name for name in names), self._part(self.members.own)])
        self.clean()

    def release(self) -> None:
        """Free the folder for other saves."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def is_foreign(path: Path) -> bool:
    """Whether a file with the name of a manifest is one of another program. A damaged one is not."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return False
    return not isinstance(content, dict) or content.get("format") != FORMAT


def _check_not_foreign(where: str, path: Path) -> None:
    """Raise for a manifest of another program, which the save would replace."""
    if is_foreign(path):
        raise CheckpointError.at(
            where,
            argument="path",
            got=f"{path.parent}, where {MANIFEST} is a file of another program",
            need="a folder of checkpoints, or a new one",
            mend="take a folder of its own for each checkpoint",
        )


def remove_unnamed(folder: Path) -> None:
    """Remove the files of earlier saves, and of saves that were broken off. The folder must be locked."""
    manifest = folder / MANIFEST
    try:
        named = {f.name for f in Manifest.from_bytes(manifest.read_bytes(), manifest).files}
    except FileNotFoundError:
        named = set()
    except CheckpointError:  # damaged: what it names could still be of use to somebody
        return
    unnamed = [name for name in os.listdir(folder) if _OURS.fullmatch(name) and name not in named]
    if unnamed:
        flush_folder(folder)  # the manifest that does not name them stays, whatever happens
        remove(folder / name for name in unnamed)
