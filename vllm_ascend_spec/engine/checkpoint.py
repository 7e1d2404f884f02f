"""What a checkpoint says of itself: `config.json` and the headers of its weight files.

Nothing here loads a weight or imports torch or vLLM.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vllm_ascend_spec.errors import UserError

_MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format


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

    @cached_property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every weight by name; empty where the weights are not safetensors.

        Raises:
            UserError: there are no weights, or a file is cut short.
        """
        files = sorted(self.directory.glob("*.safetensors"))
        if not files and not any(self.directory.glob("*.bin")) | any(self.directory.glob("*.pt")):
            raise UserError(
                f"{self.option}: {self.directory} holds no weights (*.safetensors). Copy them too."
            )
        return {name: shape for path in files for name, shape in _header(path).items()}

    def has_weight(self, part: str) -> bool | None:
        """Whether a weight's name contains `part`; None when the names cannot be read."""
        return any(part in name for name in self.shapes) if self.shapes else None


def _header(path: Path) -> dict[str, tuple[int, ...]]:
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
    return {name: tuple(entry["shape"]) for name, entry in weights.items()}
