"""Building the model, the two engines and their channel for a run."""

from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from transformers import BeamConfig

from beamline.chat import BeamChat
from beamline.config import ConfigError, Problem
from beamline.config.schema import RunConfig
from beamline.learner.learner import Learner
from beamline.learner.torch import TorchLearner
from beamline.learner.torch.evaluation import Evaluation, every_row
from beamline.model.beam import BeamShape, ModelError
from beamline.model.layout import DType, WeightKind
from beamline.model.lora import sites
from beamline.policy import model, peft
from beamline.policy.lora import Adapters, lora_shape
from beamline.policy.positions import rope_theta
from beamline.policy.weights import module_layout, named_tensors
from beamline.records import Experience
from beamline.rollout.local import LocalSampler, Numerics
from beamline.rollout.routes import check_routes
from beamline.rollout.sampler import Sampler
from beamline.rollout.vllm.layout import check_mesh
from beamline.runtime.megatron import check_megatron, megatron_learner, require_megatron
from beamline.runtime.probe import probe
from beamline.runtime.vllm import mesh, require_vllm, vllm_sampler
from beamline.starter import STARTERS
from beamline.transfer.dtypes import TORCH_DTYPES
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan, plan
from beamline.transfer.source import Tensors

DTYPE: DType = "float32"  # of exported weights: exactly those that were trained
_ROW_BYTES = 16


@dataclass(frozen=True, slots=True)
class Engines:
    """The two halves of a run, the plan that joins them, and the shape of their model.

    ``positions`` are the tokens of the longest sequence; ``replays`` says whether the learner replays routes;
    ``resources`` is what ends with the engines.
    """

    learner: Learner[Any]
    sampler: Sampler
    plan: TransferPlan
    shape: BeamShape
    positions: int
    replays: bool = False
    resources: ExitStack = field(default_factory=ExitStack)

    def sync(self, version: int) -> None:
        """Give the sampler the learner's weights."""
        self.learner.send(self.plan)
        self.sampler.receive(self.plan, version, unfinished="abort")

    def agreement(self, deadline: float) -> float:
        """How far apart sampler and learner are on a few tokens: the mean |delta log p|.

        Raises:
            ProbeError: they hold different models, or it took longer than ``deadline`` seconds.
            RouteError: routes are replayed, and the sampler records none that are possible.
        """

        def evaluate(sequences: list[Experience]) -> list[NDArray[np.float32]]:
            if self.replays:
                for rollout in (sequence.rollout for sequence in sequences):
                    check_routes(rollout.key, rollout.routes, len(rollout.token_ids), self.shape)
            found = self.learner.forward(sequences, ["logprobs"]).logprobs
            assert found is not None
            return found

        return probe(self.sampler, evaluate, self.shape, self.positions, deadline)

    def close(self) -> None:
        """End what works for the engines."""
        self.resources.close()


def model_folder(config: RunConfig) -> Path:
    """The folder that ``model.path`` names."""
    return STARTERS.get(config.model.path) or Path(config.model.path).expanduser()


def positions(config: RunConfig) -> int:
    """Tokens of the longest sequence that a run can sample."""
    evaluation = config.evaluation.max_response_tokens or config.rollout.max_response_tokens
    return config.rollout.max_prompt_tokens + max(config.rollout.max_response_tokens, evaluation)


def check_model(config: RunConfig) -> BeamShape:
    """Read the model's shape and hold the run's limits against it, before anything is loaded.

    Raises:
        ModelError: the folder is unusable, a sequence of the run would not fit into the model's context, or the model
            cannot be computed in ``policy.dtype``.
    """
    shape = BeamShape.from_folder(model_folder(config))
    _check_rows(config, shape)
    if positions(config) > shape.max_position_embeddings:
        raise ModelError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and the longest response add up to "
            f"{positions(config)} tokens, but the context of {config.model.path} is {shape.max_position_embeddings}"
        )
    if config.policy.r3 and not shape.moe_layers:
        raise ModelError(f"policy.r3=true replays the choices of experts, and {config.model.path} has no experts")
    lora = lora_shape(config.policy.lora)
    if lora is not None:
        sites(shape, lora)
    if config.rollout.engine == "vllm":
        check_mesh(shape, mesh(config.rollout))
    return shape


def _check_rows(config: RunConfig, shape: BeamShape) -> None:
    """Make sure that rows of the experts' matrices begin where grouped products want them to, every 16 bytes."""
    unit = _ROW_BYTES // TORCH_DTYPES[config.policy.dtype].itemsize
    sizes = {"hidden_size": shape.hidden_size, "moe_intermediate_size": shape.moe_intermediate_size}
    odd = [f"{name}={size}" for name, size in sizes.items() if size % unit]
    if shape.moe_layers and odd:
        raise ModelError(
            f"policy.dtype={config.policy.dtype} multiplies the experts' matrices in groups, for which "
            f"{' and '.join(sizes)} must be multiples of {unit}, and {config.model.path} has {' and '.join(odd)}: use "
            "policy.dtype=float32"
        )


def load_module(config: RunConfig) -> nn.Module:
    """The model of a run as a torch module."""
    return model.load(model_folder(config), config.policy.dtype)


def base_fingerprint(config: RunConfig) -> str:
    """A hash of the model in the folder where a checkpoint does not hold what a run needs of it.

    They are frozen under adapters, or the reference of a KL penalty; else it is empty.
    """
    if config.algorithm.kl.place == "none" and config.policy.lora.rank == 0:
        return ""
    return model.fingerprint(model_folder(config))


def check_base(config: RunConfig, trained_on: str, adapter: Path) -> None:
    """Hold the model in a run's folder against the fingerprint of the one beside which adapters were trained.

    Raises:
        ModelError: it is another one.
    """
    if base_fingerprint(config) != trained_on:
        raise ModelError(
            f"{adapter} was trained beside another model than the one in {model_folder(config)} now, "
            "for which it has no meaning: put the old one back, or say where it is (model.path)"
        )


def load_adapters(config: RunConfig, begins: bool = True) -> Adapters | None:
    """The adapters that a run trains; None where it trains every weight.

    Where it does not begin, the values of a checkpoint will take the place of theirs, and no folder is read.

    Raises:
        ModelError: they match no linear layer, or the adapter to begin from does not fit or is of another base.
    """
    settings = config.policy.lora
    lora = lora_shape(settings)
    if lora is None:
        return None
    adapters = Adapters(check_model(config), lora, settings.init, config.seed)
    if settings.adapter_path is not None and begins:
        folder = settings.adapter_path.expanduser()
        peft.load(adapters, folder)
        trained_on = peft.describe(folder).base_sha256
        if trained_on:  # of an adapter that was made elsewhere it is not known
            check_base(config, trained_on, folder)
    return adapters


def load_chat(config: RunConfig) -> BeamChat:
    """The tokenizer and chat format of a run's model, checked against the model's shape.

    Raises:
        ModelError: the folder is unusable, the chat template does not use an argument that the run gives it, or the
            tokenizer has ids that the model does not know.
    """
    shape, chat = check_model(config), BeamChat(model_folder(config), config.chat.template_arguments)
    if chat.vocab_size > shape.vocab_size:
        raise ModelError(
            f"the tokenizer of {model_folder(config)} has {chat.vocab_size} tokens, the model's vocab_size is "
            f"{shape.vocab_size}"
        )
    return chat


@dataclass(frozen=True, slots=True)
class Models:
    """What a run computes with: the model, adapters beside it, and a copy that a KL penalty holds it near.

    There is no module where the learner's ranks read the model themselves.
    """

    module: nn.Module | None
    adapters: Adapters | None
    reference: nn.Module | None


def load_models(config: RunConfig, begins: bool = True) -> Models:
    """Load what a run computes with. One that does not begin has its learner load a checkpoint later.

    Raises:
        ConfigError: an engine that the run asks for is not installed, or there is no GPU for it.
        ModelError: the model folder cannot be used.
    """
    require_engine(config)
    require_learner(config)
    if config.learner.engine == "megatron":
        check_megatron(config, check_model(config))
        return Models(None, None, None)
    module, adapters = load_module(config), load_adapters(config, begins)
    needs_copy = config.algorithm.kl.place != "none" and adapters is None
    return Models(module, adapters, load_module(config) if needs_copy else None)


def build(config: RunConfig, models: Models) -> Engines:
    """Build both engines; under adapters the sampler is given the weights once, here.

    Raises:
        EngineFailedError: an engine did not start.
    """
    channel = LocalChannel()
    with ExitStack() as resources:
        learner = _learner(config, models, channel, resources)
        sampler = resources.enter_context(closing(_sampler(config, channel, config.output / "engines")))
        if models.adapters is not None:
            base = plan(learner.layout("full"), sampler.layout("full"))
            learner.send(base)
            sampler.receive(base, 0, unfinished="abort")
        moves = plan(learner.layout(learner.kind), sampler.layout(learner.kind))
        shape, replays = check_model(config), config.policy.r3
        return Engines(learner, sampler, moves, shape, positions(config), replays, resources.pop_all())


def _learner(config: RunConfig, models: Models, channel: LocalChannel, resources: ExitStack) -> Learner[Any]:
    """The learner that a run asks for; what ends with it is left to ``resources``."""
    if models.module is not None:
        return TorchLearner(models.module, config.policy, config.learner, channel, models.adapters, models.reference)
    return resources.enter_context(megatron_learner(config, model_folder(config), channel))


def sampler_of(config: RunConfig, module: nn.Module, version: int, adapters: Adapters | None = None) -> Sampler:
    """A sampler alone, with a module's weights and adapters: for evaluation without training.

    Raises:
        ConfigError, EngineFailedError: as :func:`build`.
        ProbeError: the engine does not compute what the module does.
    """
    channel = LocalChannel()
    with ExitStack() as resources:
        sampler = resources.enter_context(closing(_sampler(config, channel, None)))
        _give(sampler, channel, module, version, adapters)
        if config.rollout.engine != "local":  # whose kernels are the module's own
            evaluation, limit = Evaluation(module, config.policy, adapters), config.learner.micro_batch_tokens
            probe(
                sampler,
                lambda sequences: evaluation.of_sequences(sequences, limit, every_row)[0],
                check_model(config),
                positions(config),
                config.rollout.deadline_seconds,
            )
        resources.pop_all()
        return sampler


def _give(sampler: Sampler, channel: LocalChannel, module: nn.Module, version: int, adapters: Adapters | None) -> None:
    """Bring a module's weights, and adapters, into a sampler."""
    kinds: list[tuple[WeightKind, nn.Module]] = [("full", module)]
    for kind, weights in kinds if adapters is None else [*kinds, ("adapter", adapters)]:
        moves = plan(module_layout(weights), sampler.layout(kind))
        channel.send(moves, Tensors(named_tensors(weights)))
        sampler.receive(moves, version, unfinished="abort")


def require_engine(config: RunConfig) -> None:
    """Make sure that what a run samples with is installed, before anything is loaded.

    Raises:
        ConfigError: it is not.
    """
    if config.rollout.engine == "vllm":
        require_vllm()


def require_learner(config: RunConfig) -> None:
    """Make sure that what a run learns with is here, and where.

    Raises:
        ConfigError: it is not.
    """
    if config.learner.engine == "megatron":
        require_megatron()
    elif config.policy.device == "cuda" and not torch.cuda.is_available():
        reason = "torch finds no NVIDIA GPU here: use cpu"
        raise ConfigError([Problem(reason, "policy.device", "cuda")])


def _sampler(config: RunConfig, channel: LocalChannel, logs: Path | None) -> Sampler:
    """The sampler that a run asks for, without weights."""
    if config.rollout.engine == "local":
        return local_sampler(config, channel)
    shape, folder = check_model(config), model_folder(config)
    return vllm_sampler(config.rollout, shape, folder, positions(config), config.seed, channel, config.policy.r3, logs)


def local_sampler(config: RunConfig, channel: LocalChannel) -> LocalSampler:
    """The embedded sampler for a run, without weights."""
    rollout = config.rollout
    return LocalSampler(
        shape=check_model(config),
        numerics=Numerics(rollout.dtype, rollout.kv_dtype, rollout.head_dtype),
        rope_theta=rope_theta(BeamConfig.from_pretrained(model_folder(config))),
        slots=rollout.slots,
        positions=positions(config),
        seed=config.seed,
        channel=channel,
        threads=config.runtime.threads,
        lora=lora_shape(config.policy.lora),
    )
