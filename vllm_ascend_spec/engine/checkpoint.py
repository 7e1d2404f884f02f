"""What a checkpoint says of itself: `config.json`, the headers of its weight files, its norms.

No weights but those of norms are read, some KiB a layer, and neither torch nor vLLM is imported.
"""

from __future__ import annotations

import json
import math
import re
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vllm_ascend_spec.errors import UserError

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format
_NORM = re.compile(r"(^|\.)\w*norm\w*(\.\d+)?\.weight$")
_OTHER_TOWERS = ("visual", "vision", "audio")  # LayerNorm, with conventions of their own
# How each dtype of a header is read; bfloat16 is the upper half of a float32.
_DTYPES = {"BF16": "<u2", "F16": "<f2", "F32": "<f4"}


@dataclass(frozen=True)
class Weight:
    """Where a weight lies. dtype: as safetensors names it; offset: bytes from the file's start."""

    path: Path
    shape: tuple[int, ...]
    dtype: str
    offset: int

    def values(self) -> NDArray[np.float32]:
        """float32 of the weight's shape; KeyError where its dtype is none of BF16, F16, F32."""
        count = math.prod(self.shape)
        stored = np.fromfile(self.path, _DTYPES[self.dtype], count, offset=self.offset)
        if self.dtype == "BF16":
            stored = (stored.astype("<u4") << 16).view("<f4")
        return stored.astype(np.float32).reshape(self.shape)


@dataclass(frozen=True)
class Checkpoint:
    """A local checkpoint directory; `option` is how the user named it, for messages."""

    directory: Path
    option: str

    @classmethod
    def find(cls, name: str, option: str) -> Checkpoint | None:
        """The checkpoint at a local path; None for the name of a hub repository.

        Raises:
            UserError: the path does not exist or holds no model.
        """
        path = Path(name).expanduser()
        if not path.exists():
            is_hub_name = not name.startswith((".", "/", "~")) and name.count("/") <= 1
            if is_hub_name:
                return None
            raise UserError(f"{option}: {name} does not exist. Give the directory of a model.")
        if not (path / "config.json").is_file():
            raise UserError(
                f"{option}: {name} has no config.json. Give the directory that holds the model's "
                "config.json and weights."
            )
        return cls(path, option)

    @property
    def config_path(self) -> Path:
        return self.directory / "config.json"

    @cached_property
    def config(self) -> dict[str, Any]:
        """The configuration, with the keys of a nested text or layer configuration."""
        try:
            config = json.loads(self.config_path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"{self.config_path} is not JSON: {error}. Copy it anew.") from None
        if not isinstance(config, dict):
            raise UserError(f"{self.config_path} is not a JSON object. Copy it anew.")
        # Multimodal targets nest the text model, drafters of the speculators library their layers.
        for nested in ("text_config", "transformer_layer_config"):
            if isinstance(config.get(nested), dict):
                config = config[nested] | {k: v for k, v in config.items() if v is not None}
        return config

    @property
    def architecture(self) -> str:
        return str((self.config.get("architectures") or ["(none)"])[0])

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by name; empty where the weights are not safetensors."""
        return {name: weight.shape for name, weight in self.weights.items()}

    @cached_property
    def weights(self) -> dict[str, Weight]:
        """Every weight by name; empty where the weights are not safetensors.

        Raises:
            UserError: there are no weights, or a file is cut short.
        """
        files = sorted(self.directory.glob("*.safetensors"))
        if not files and not any(self.directory.glob("*.bin")) | any(self.directory.glob("*.pt")):
            raise UserError(
                f"{self.option}: {self.directory} holds no weights (*.safetensors). Copy them too."
            )
        return {name: weight for path in files for name, weight in _header(path).items()}

    @cached_property
    def norms(self) -> dict[str, NDArray[np.float32]]:
        """Weights of the language model's norms by name; those in other dtypes are left out."""
        return {
            name: weight.values()
            for name, weight in self.weights.items()
            if _NORM.search(name)
            and len(weight.shape) == 1
            and weight.dtype in _DTYPES
            and not any(tower in name for tower in _OTHER_TOWERS)
        }

    def has_weight(self, part: str) -> bool | None:
        """Whether a weight's name contains `part`; None when the names cannot be read."""
        return any(part in name for name in self.weights) if self.weights else None


def _header(path: Path) -> dict[str, Weight]:
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > _MAX_HEADER_BYTES:
                raise ValueError("header too long")
            header = json.loads(file.read(length))
        weights = {k: entry for k, entry in header.items() if k != "__metadata__"}
        end = max((entry["data_offsets"][1] for entry in weights.values()), default=0)
        if path.stat().st_size < 8 + length + end:
            raise ValueError("shorter than its header says")
    except (ValueError, struct.error, KeyError) as error:
        raise UserError(
            f"{path} is not a whole safetensors file ({error}). Copy it anew."
        ) from None
    return {
        name: Weight(
            path, tuple(entry["shape"]), str(entry["dtype"]), 8 + length + entry["data_offsets"][0]
        )
        for name, entry in weights.items()
    }
