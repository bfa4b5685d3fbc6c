"""Building the model, the two engines and their channel for a run, all in this process."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from torch import nn

from beamline.chat import BeamChat
from beamline.config.schema import RunConfig
from beamline.learner.learner import Learner
from beamline.learner.torch import TorchLearner
from beamline.model.beam import BeamShape, ModelError
from beamline.model.layout import DType
from beamline.policy import model
from beamline.policy.positions import rope_theta
from beamline.policy.weights import module_layout, named_tensors
from beamline.rollout.local import LocalSampler
from beamline.rollout.sampler import Sampler
from beamline.starter import STARTERS
from beamline.transfer.local import LocalChannel
from beamline.transfer.plan import TransferPlan, plan

DTYPE: DType = "float32"  # of the embedded engines: AdamW needs it, and at their sizes a CPU is fastest in it


@dataclass(frozen=True, slots=True)
class Engines:
    """The two halves of a run and the plan that joins them."""

    learner: Learner[Any]
    sampler: Sampler
    plan: TransferPlan

    def sync(self, version: int) -> None:
        """Give the sampler the learner's weights."""
        self.learner.send(self.plan)
        self.sampler.receive(self.plan, version, unfinished="abort")


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
        ModelError: the folder is unusable, or a sequence of the run would not fit into the model's context.
    """
    shape = BeamShape.from_folder(model_folder(config))
    if positions(config) > shape.max_position_embeddings:
        raise ModelError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} and the longest response add up to "
            f"{positions(config)} tokens, but the context of {config.model.path} is {shape.max_position_embeddings}"
        )
    return shape


def load_module(config: RunConfig) -> nn.Module:
    """The model of a run as a torch module."""
    return model.load(model_folder(config), DTYPE)


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


def build(config: RunConfig) -> Engines:
    """Load the model and build both engines.

    Raises:
        ModelError: the model folder cannot be used.
    """
    module, channel = load_module(config), LocalChannel()
    reference = None if config.algorithm.kl.place == "none" else load_module(config)
    learner = TorchLearner(module, config.policy, config.learner, channel, reference)
    sampler = local_sampler(config, check_model(config), module, channel)
    return Engines(learner, sampler, plan(learner.layout("full"), sampler.layout("full")))


def sampler_of(config: RunConfig, module: nn.Module, version: int) -> Sampler:
    """A sampler alone, with a module's weights: for evaluation without training."""
    channel = LocalChannel()
    sampler = local_sampler(config, check_model(config), module, channel)
    weights = plan(module_layout(module), sampler.layout("full"))
    channel.send(weights, named_tensors(module))
    sampler.receive(weights, version, unfinished="abort")
    return sampler


def local_sampler(config: RunConfig, shape: BeamShape, module: nn.Module, channel: LocalChannel) -> LocalSampler:
    """The embedded sampler for a run."""
    theta = rope_theta(cast(Any, module).config)
    rollout = config.rollout
    threads = config.runtime.threads
    return LocalSampler(shape, DTYPE, theta, rollout.slots, positions(config), config.seed, channel, threads)
