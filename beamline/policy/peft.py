"""Adapters as files in PEFT's format.

A file names every linear layer by itself, so that an A which linears share stands in it under each of them, and an
adapter that all experts of a layer share under each expert. What PEFT has no field for stands in the metadata of the
tensors' file: how experts share, and which weights the adapter was trained beside.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, get_args

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from beamline.checkpoint import write_atomic
from beamline.checkpoint.files import Bytes, make_folder, write_json
from beamline.config.policy import RANK_STEP
from beamline.model.beam import ModelError
from beamline.model.layout import DType
from beamline.model.lora import ExpertAdapters, LoraShape, Site, kind_of
from beamline.policy.lora import Adapters
from beamline.policy.weights import named_tensors

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_EXPERTS, _BASE, _DTYPE = "beamline.experts", "beamline.base_sha256", "beamline.base_dtype"  # in the metadata
_STORED = (torch.float32, torch.bfloat16, torch.float16)
_SHOWN = 3  # names in a message
_MOST = 1_000_000  # of rank and alpha

# Linears that PEFT takes for experts wherever they stand: it looks for them in the stacked parameters of Beam.
_OF_EXPERTS = ("gate_proj", "up_proj", "down_proj")

# Fields that say nothing about what a tensor of the file does. Any other must be unset, or it would be ignored.
_WITHOUT_EFFECT = {
    "auto_mapping", "base_model_name_or_path", "exclude_modules", "inference_mode", "layers_pattern",
    "layers_to_transform", "lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "revision", "target_modules", "target_parameters", "task_type",
}  # fmt: skip
_UNSET: tuple[Any, ...] = (None, False, "none", {}, [])
_ALLOWED = {"init_lora_weights": (True, False, "gaussian")}  # others change the base


@dataclass(frozen=True, slots=True)
class AdapterFolder:
    """What a folder says of its adapter: the model that it belongs to, and the numbers that fix its tensors.

    ``base_sha256`` is the fingerprint of that model's weights, empty where the folder does not have it.
    """

    base: str
    base_sha256: str
    base_dtype: str
    lora: LoraShape


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def save(adapters: Adapters, folder: Path, base: str, base_sha256: str = "", base_dtype: DType = "float32") -> None:
    """Write ``adapter_model.safetensors`` and ``adapter_config.json``; the folder is made where there is none.

    The configuration comes last: a folder without one is no adapter.

    ``base``, ``base_sha256`` and ``base_dtype`` are the model's folder or name, its fingerprint, and the type of its
    weights beside the adapter. PEFT reads the
    files for a Beam, but for experts with an adapter on gate or up and none on the other, which it refuses.

    Raises:
        OSError: the disk fails or is full.
    """
    make_folder(folder)
    (folder / CONFIG).unlink(missing_ok=True)
    own = named_tensors(adapters)
    stored = {name: own[canonical] for name, canonical in _file_names(adapters.sites)}
    metadata = {"format": "pt", _EXPERTS: adapters.lora.experts, _BASE: base_sha256, _DTYPE: base_dtype}
    write_atomic(folder / WEIGHTS, _chunks(stored, metadata))
    write_json(folder / CONFIG, _config(adapters, base))


def load(adapters: Adapters, folder: Path) -> None:
    """Fill adapters with those of a folder, whoever wrote it.

    Raises:
        ModelError: a file is missing or corrupt; rank or alpha are others; the file is of another kind of adapter; a
            tensor belongs to no adapter, is missing, misshapen, not finite, or differs from one that it has to equal.
    """
    settings = _read_config(folder)
    for field, key, ours in (("r", "rank", adapters.lora.rank), ("lora_alpha", "alpha", adapters.lora.alpha)):
        if settings[field] != ours:
            raise ModelError(f"{folder / CONFIG}: {field}={settings[field]}, but policy.lora.{key}={ours:g}")
    own, names = named_tensors(adapters), dict(_file_names(adapters.sites))
    filled: dict[str, str] = {}
    with _opened(folder / WEIGHTS) as file:
        _check_names(folder / WEIGHTS, set(file.keys()), names, adapters.lora)
        for name, canonical in names.items():
            tensor = _checked(folder / WEIGHTS, name, file.get_tensor(name), own[canonical].shape)
            if canonical not in filled:
                own[canonical].copy_(tensor)
                filled[canonical] = name
            elif not torch.equal(own[canonical], tensor.float()):
                raise ModelError(f"{folder / WEIGHTS}: {name} differs from {filled[canonical]}: {_why_equal(adapters)}")


def describe(folder: Path) -> AdapterFolder:
    """Read what a folder says of its adapter.

    A folder that does not say how experts share is read as one adapter an expert, which is right for any.

    Raises:
        ModelError: a file is missing or corrupt, is of another kind of adapter, or names no base.
    """
    settings = _read_config(folder)
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise ModelError(f"{folder / CONFIG}: base_model_name_or_path={base!r} does not name the model")
    with _opened(folder / WEIGHTS) as file:
        metadata = file.metadata() or {}
        targets = {kind_of(name.removeprefix(_PREFIX).rsplit(".", 2)[0]) for name in file.keys()}  # noqa: SIM118
    if not targets:
        raise ModelError(f"{folder / WEIGHTS} holds no tensor of an adapter")
    experts: ExpertAdapters = "none"
    if any("mlp.experts." in target for target in targets):
        experts = cast(ExpertAdapters, metadata.get(_EXPERTS, "per_expert"))
        if experts not in get_args(ExpertAdapters):
            raise ModelError(
                f"{folder / WEIGHTS}: {_EXPERTS}={experts!r} is none of {', '.join(get_args(ExpertAdapters))}"
            )
    lora = LoraShape(settings["r"], float(settings["lora_alpha"]), tuple(sorted(targets)), experts)
    return AdapterFolder(base, metadata.get(_BASE, ""), metadata.get(_DTYPE, "float32"), lora)


def _file_names(sites: Sequence[Site]) -> Iterator[tuple[str, str]]:
    """The name of each tensor in a file, and the name among the adapters' tensors of what it holds."""
    for site in sites:
        for place, _, held in site.served():
            for projection in site.adapted:
                at = f"{_PREFIX}{place}.{projection}"
                yield f"{at}.lora_A.weight", f"{held}.{site.adapted[0]}.lora_A.weight"
                yield f"{at}.lora_B.weight", f"{held}.{projection}.lora_B.weight"


def _why_equal(adapters: Adapters) -> str:
    shared = adapters.lora.experts == "shared_per_layer"
    return "linear layers that read one input share their A here" + (
        ", and all experts of a layer one adapter (policy.lora.experts=shared_per_layer)" * shared
    )


def _config(adapters: Adapters, base: str) -> dict[str, Any]:
    """``adapter_config.json``, so that PEFT finds every adapter of a Beam.

    PEFT looks for ``gate_proj``, ``up_proj`` and ``down_proj`` among experts alone. Those of attention and of dense
    MLPs it finds as parameters. Dropout is not said: it has no part in what an adapter computes, and PEFT reads no
    adapter of a parameter that has it.
    """
    modules: set[str] = set()
    parameters: set[str] = set()
    for site in adapters.sites:
        for projection in site.adapted:
            if projection in _OF_EXPERTS and site.experts is None:
                parameters.add(f"{kind_of(site.place)}.{projection}.weight")
            else:
                modules.add(projection)
    if modules & {"gate_proj", "up_proj"}:
        modules.add("down_proj")  # without it PEFT looks for the others in another place; B is 0 where there is none
    alpha = adapters.lora.alpha
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": None,
        "inference_mode": True,
        "r": adapters.lora.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(modules),
        "target_parameters": sorted(parameters) or None,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "use_rslora": False,
        "use_dora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "layers_to_transform": None,
        "modules_to_save": None,
    }


def _chunks(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Iterator[Bytes]:
    """A safetensors file. The library writes metadata in an order that changes from one process to the next."""
    header: dict[str, Any] = {"__metadata__": metadata}
    offset = 0
    for name, tensor in tensors.items():
        end = offset + tensor.nbytes
        header[name] = {"dtype": "F32", "shape": tuple(tensor.shape), "data_offsets": (offset, end)}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for tensor in tensors.values():
        yield tensor.numpy()


def _read_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json``, once it is known to be of a plain LoRA."""
    path = folder / CONFIG
    try:
        settings = json.loads(path.read_text())
    except FileNotFoundError:
        raise ModelError(f"{path} is missing: {folder} is no adapter in PEFT's format") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}") from error
    if not isinstance(settings, dict):
        raise ModelError(f"{path} holds a {type(settings).__name__}, not an object")
    if settings.get("peft_type") != "LORA":
        raise ModelError(f"{path}: peft_type is {settings.get('peft_type')!r}, and only 'LORA' can be read")
    for field, kinds in (("r", int), ("lora_alpha", (int, float))):
        value = settings.get(field)
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value <= _MOST:
            raise ModelError(f"{path}: {field} is no number above 0 and up to {_MOST:,}")
    if settings["r"] % RANK_STEP:
        raise ModelError(f"{path}: r={settings['r']}, and ranks are multiples of {RANK_STEP} here")
    relevant = {key: value for key, value in settings.items() if key not in _WITHOUT_EFFECT}
    unread = [f"{key}={value!r}" for key, value in relevant.items() if value not in _ALLOWED.get(key, _UNSET)]
    if unread:
        raise ModelError(f"{path}: only plain LoRA can be read, and this has {', '.join(unread)}")
    return settings


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(str(path), framework="pt") as file:
            yield file
    except FileNotFoundError:
        raise ModelError(f"{path} is missing") from None
    except SafetensorError as error:
        raise ModelError(f"{path} is corrupt: {error}; copy the adapter again") from error
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error}") from error


def _check_names(path: Path, found: set[str], names: Mapping[str, str], lora: LoraShape) -> None:
    unknown, missing = sorted(found - names.keys()), [name for name in names if name not in found]
    problems = [f"{len(unknown)} of its {len(found)} tensors belong to no adapter: {_first(unknown)}"] * bool(unknown)
    problems += [f"{len(missing)} of {len(names)} tensors of adapters are not in it: {_first(missing)}"] * bool(missing)
    if problems:
        targets = "all-linear" if lora.targets is None else ",".join(lora.targets)
        raise ModelError(
            f"{path} does not fit policy.lora.targets={targets} and policy.lora.experts={lora.experts}: "
            + "; ".join(problems)
        )


def _first(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN]) + ", ..." * (len(names) > _SHOWN)


def _checked(path: Path, name: str, tensor: Tensor, shape: torch.Size) -> Tensor:
    if tensor.shape != shape:
        raise ModelError(f"{path}: {name} has shape {tuple(tensor.shape)}, expected {tuple(shape)}")
    if tensor.dtype not in _STORED:
        raise ModelError(f"{path}: {name} is of type {tensor.dtype}; use float32, bfloat16 or float16")
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(f"{path}: {name} holds values that are not finite")
    return tensor
