"""Stands in, on the ranks of Horovod's examples, for data that would be downloaded and for names that frameworks have lost.

tools/horovod_examples.py puts a module sitecustomize on the path of the ranks, which calls ``install`` before the script
begins. Nothing large is imported then: a module is changed, or made, when the script imports it. GROUPS has the stand-ins in
groups, of which each example is given those that it needs.
"""

from __future__ import annotations

import builtins
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import io
import random
import struct
import sys
import tempfile
import types
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = [
    "GROUPS",
    "Group",
    "digits",
    "install",
    "write_digits",
    "write_image_folders",
    "write_records",
    "write_words",
]

TRAINING, TESTING = 640, 128  # the numbers of generated images
EPOCHS, STEPS, BATCHES = 4, 4, 20  # the most epochs and steps that `fit` gets, and the most batches of other loops
MANY = 1000  # steps, from which on a loop is made shorter


# Functions that generate data, in memory and in files.


def digits(count: int, seed: int) -> tuple[Any, Any]:
    """Return images of 28 by 28 pixels in ten classes that are easy to tell apart, and their labels."""
    import numpy as np

    patterns = np.random.default_rng(0).integers(0, 2, (10, 7, 7)) * 200
    chance = np.random.default_rng(seed)
    labels = chance.permutation(np.arange(count) % 10).astype("uint8")
    images = patterns[labels].repeat(4, axis=1).repeat(4, axis=2) + chance.integers(0, 50, (count, 28, 28))
    return images.astype("uint8"), labels


def _jpeg(seed: int) -> bytes:
    import numpy as np
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3)).astype("uint8")
    written = io.BytesIO()
    Image.fromarray(pixels).resize((256, 256)).save(written, "JPEG")
    return written.getvalue()


def write_image_folders(place: Path, count: int = 16, classes: int = 1000) -> None:
    """Make a folder below ``place`` for each class, with one image in each of the first ``count``."""
    for one in range(classes):
        folder = place / f"{one:04}"
        folder.mkdir(parents=True)
        if one < count:
            (folder / "image.jpg").write_bytes(_jpeg(one))


def write_records(place: Path, count: int = 16) -> None:
    """Write ``count`` images to ``place`` as records of MXNet, and beside it, to the file .idx, where each begins."""
    begins = []
    with place.open("wb") as file:
        for one in range(count):
            begins.append(f"{one}\t{file.tell()}\n")
            record = struct.pack("<IfQQ", 0, float(one), one, 0) + _jpeg(one)
            file.write(struct.pack("<II", 0xCED7230A, len(record)) + record + bytes(-len(record) % 4))
    place.with_suffix(".idx").write_text("".join(begins), encoding="utf-8")


def write_digits(path: Path) -> None:
    """Write a zip archive with images and labels in the format of the data set MNIST."""
    with zipfile.ZipFile(path, "w") as file:
        for name, count, seed in (("train", TRAINING, 1), ("t10k", TESTING, 2)):
            images, labels = digits(count, seed)
            file.writestr(f"{name}-images-idx3-ubyte", struct.pack(">IIII", 2051, count, 28, 28) + images.tobytes())
            file.writestr(f"{name}-labels-idx1-ubyte", struct.pack(">II", 2049, count) + labels.tobytes())


def write_words(path: Path, size: int = 31344016) -> None:
    """Write a zip archive of ``size`` bytes that begins with a text of more than 50,000 different words."""
    chance = random.Random(0)
    words = [f"word{number}" for number in range(60_000)]
    text = " ".join([*words, *(words[int(len(words) * chance.random() ** 4)] for _ in words)])

    def write(filling: int) -> int:
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("text", text)
            file.writestr("filling", bytes(filling))
        return path.stat().st_size

    write(size - write(0))


# Functions that change modules after their import, and the contents of modules that are made.


def _keras_digits(module: Any) -> None:
    module.load_data = lambda path="": (digits(TRAINING, 1), digits(TESTING, 2))


def _mxnet_download(module: Any) -> None:
    def download(url: str, dirname: str = ".", **_: Any) -> str:
        path = Path(dirname) / url.rpartition("/")[2]
        write_digits(path)
        return str(path)

    module.download = download


def _words_download(module: Any) -> None:
    def urlretrieve(url: str, filename: str) -> tuple[str, None]:
        write_words(Path(filename))
        return filename, None

    module.urlretrieve = urlretrieve


def _torchvision_transforms() -> dict[str, Any]:
    """Return stand-ins for the transforms of torchvision, by name. They work on images that are NumPy arrays."""
    import numpy as np
    import torch

    def compose(steps: Sequence[Callable[[Any], Any]]) -> Callable[[Any], Any]:
        return lambda image: functools.reduce(lambda so_far, step: step(so_far), steps, image)

    def to_tensor() -> Callable[[Any], Any]:
        return lambda image: torch.tensor(np.atleast_3d(image).transpose(2, 0, 1) / 255, dtype=torch.float32)

    def normalize(mean: Sequence[float], std: Sequence[float]) -> Callable[[Any], Any]:
        return lambda image: (image - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    def crop(size: int) -> Callable[[Any], Any]:
        return lambda image: image[:size, :size]

    names: dict[str, Any] = {"Compose": compose, "ToTensor": to_tensor, "Normalize": normalize}
    names |= {"RandomResizedCrop": crop, "CenterCrop": crop, "Resize": crop}
    return {**names, "RandomHorizontalFlip": lambda: lambda image: image}


def _torchvision_datasets() -> dict[str, Any]:
    import numpy as np
    from torch.utils.data import Dataset

    class Images(Dataset[Any]):
        def __init__(self, images: Any, labels: Any, transform: Callable[[Any], Any]) -> None:
            self._images, self._labels, self._transform = images, labels, transform

        def __len__(self) -> int:
            return len(self._images)

        def __getitem__(self, index: int) -> tuple[Any, int]:
            return self._transform(self._images[index]), int(self._labels[index])

    def mnist(root: str, train: bool = True, download: bool = False, transform: Any = None) -> Images:
        return Images(*(digits(TRAINING, 1) if train else digits(TESTING, 2)), transform)

    def image_folder(root: str, transform: Any = None) -> Images:
        chance = np.random.default_rng(0)
        return Images(chance.integers(0, 255, (32, 256, 256, 3)), chance.integers(0, 1000, 32), transform)

    return {"MNIST": mnist, "ImageFolder": image_folder}


def _torchvision_models() -> dict[str, Any]:
    """Return a small model for images in 1000 classes, under the name of a large one."""
    from torch import nn

    def resnet50() -> nn.Module:
        convolution = nn.Conv2d(3, 8, kernel_size=5, stride=4)
        return nn.Sequential(
            convolution, nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1000)
        )

    return {"resnet50": resnet50, "VGG16_Weights": None, "vgg16": None}  # torchmetrics imports the last two


def _summary_writer() -> dict[str, Any]:
    class SummaryWriter:
        def __init__(self, log_dir: str) -> None: ...

        def add_scalar(self, tag: str, value: Any, step: int) -> None:
            print(f"{tag} at {step}: {float(value)}")

    return {"SummaryWriter": SummaryWriter}


def _logs_as_tables(module: Any) -> None:
    module.TensorBoardLogger = module.CSVLogger


def _gluon_models() -> dict[str, Any]:
    def get_model(name: str, **kwargs: Any) -> Any:
        vision = importlib.import_module("mxnet.gluon.model_zoo.vision")
        return vision.get_model(name, **kwargs)

    return {"get_model": get_model}


# Shorter loops.


def _short_fit(module: Any) -> None:
    whole = module.Model.fit

    @functools.wraps(whole)
    def fit(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, most in (("epochs", EPOCHS), ("steps_per_epoch", STEPS), ("validation_steps", STEPS)):
            if kwargs.get(name) is not None:
                kwargs[name] = min(kwargs[name], most)
        return whole(self, *args, **kwargs)

    module.Model.fit = fit


def _short_take(module: Any) -> None:
    whole = module.DatasetV2.take

    @functools.wraps(whole)
    def take(self: Any, count: int, *args: Any, **kwargs: Any) -> Any:
        return whole(self, BATCHES if count > MANY else count, *args, **kwargs)

    module.DatasetV2.take = take


def _short_hook(module: Any) -> None:
    whole = module.StopAtStepHook.__init__

    @functools.wraps(whole)
    def init(self: Any, num_steps: int | None = None, last_step: int | None = None) -> None:
        whole(self, num_steps, last_step if last_step is None else min(last_step, BATCHES))

    module.StopAtStepHook.__init__ = init


def _short_range() -> None:
    """Make the loops of the script itself shorter: it finds this ``range`` among its own names."""

    def short(*numbers: int) -> range:
        return range(BATCHES) if len(numbers) == 1 and numbers[0] > MANY else range(*numbers)

    vars(sys.modules["__main__"])["range"] = short


# Other processors, and other releases of frameworks.


def _torch_without_gpu(module: Any) -> None:
    module.cuda.set_device = lambda device: None
    module.nn.Module.cuda = lambda self, device=None: self


def _mxnet_without_gpu(module: Any) -> None:
    module.gpu = module.cpu


def _mxnet_2(module: Any) -> None:
    module.gluon.metric = module.metric
    sys.modules["mxnet.gluon.metric"] = module.metric


def _see_tensorflow_1() -> None:
    """Make ``import tensorflow`` and ``import keras`` in the script import tensorflow.compat.v1 and its Keras.

    In other packages, which the script imports, these imports still give TensorFlow 2.
    """
    plain = builtins.__import__
    keras = "tf_keras.api._v1.keras"

    def seen(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
        from_script = globals is not None and globals.get("__name__") == "__main__" and level == 0
        found = name.removeprefix("tensorflow.") if name.startswith("tensorflow.keras") else name
        if not from_script or found.partition(".")[0] not in ("tensorflow", "keras"):
            return plain(name, globals, locals, fromlist, level)
        v1 = _tensorflow_1()
        if found == "tensorflow":
            return v1
        return importlib.import_module(found.replace("keras", keras, 1) if fromlist else keras)

    builtins.__import__ = seen


@functools.cache
def _tensorflow_1() -> Any:
    tf: Any = importlib.import_module("tensorflow.compat.v1")
    tf.disable_v2_behavior()
    # TensorFlow's own `run` asks for the GPUs first, after which the way of execution cannot be chosen any more.
    tf.app.run = lambda main=None: sys.exit((main or vars(sys.modules["__main__"])["main"])(sys.argv))
    if not hasattr(tf, "estimator"):
        tf.estimator = _estimators(tf)
    return tf


def _estimators(tf: Any) -> Any:
    """Return what TensorFlow 1 had as tf.estimator, as far as the examples use it."""

    class Estimator:
        def __init__(self, model_fn: Callable[..., Any], model_dir: str | None = None, config: Any = None) -> None:
            self._model, self._place, self._config = model_fn, model_dir or tempfile.mkdtemp(), config

        def _made(self, input_fn: Callable[[], Any], mode: str) -> dict[str, Any]:
            tf.train.get_or_create_global_step()
            features, labels = input_fn()
            made: dict[str, Any] = self._model(features=features, labels=labels, mode=mode)
            return made

        def train(self, input_fn: Callable[[], Any], steps: int, hooks: Sequence[Any]) -> None:
            with tf.Graph().as_default():
                train = self._made(input_fn, "train")["train_op"]
                hooks = [*hooks, tf.train.StopAtStepHook(last_step=steps)]
                with tf.train.MonitoredTrainingSession(
                    checkpoint_dir=self._place, hooks=hooks, config=self._config
                ) as session:
                    while not session.should_stop():
                        session.run(train)

        def evaluate(self, input_fn: Callable[[], Any]) -> dict[str, Any]:
            with tf.Graph().as_default():
                ops = self._made(input_fn, "eval")["eval_metric_ops"]
                creator = tf.train.ChiefSessionCreator(checkpoint_dir=self._place, config=self._config)
                found: dict[str, Any] = {}
                with tf.train.MonitoredSession(creator) as session:
                    while not session.should_stop():
                        found = session.run({name: update for name, (_, update) in ops.items()})
                return found

    def numpy_input_fn(x: Any, y: Any, shuffle: bool, batch_size: int = 128, num_epochs: int | None = 1) -> Any:
        def batches() -> Any:
            data = tf.data.Dataset.from_tensor_slices((x, y)).repeat(num_epochs)
            data = data.shuffle(MANY) if shuffle else data
            return tf.data.make_one_shot_iterator(data.batch(batch_size)).get_next()

        return batches

    return types.SimpleNamespace(
        Estimator=Estimator,
        EstimatorSpec=dict,
        RunConfig=lambda session_config: session_config,
        ModeKeys=types.SimpleNamespace(TRAIN="train", EVAL="eval", PREDICT="infer"),
        inputs=types.SimpleNamespace(numpy_input_fn=numpy_input_fn),
    )


# Which stand-ins there are, and how they come into a process.


@dataclass(frozen=True)
class Group:
    """Stand-ins by the module: ``changed`` after its import, or ``made``. ``begun`` is called before the script begins."""

    says: str
    changed: Mapping[str, Callable[[Any], None]] = field(default_factory=dict)
    made: Mapping[str, Callable[[], dict[str, Any]]] = field(default_factory=dict)
    begun: Callable[[], None] | None = None


_KERAS = "tf_keras.src.engine"
_TORCHVISION = {
    "torchvision": dict,
    "torchvision.datasets": _torchvision_datasets,
    "torchvision.models": _torchvision_models,
    "torchvision.transforms": _torchvision_transforms,
}
GROUPS: dict[str, Group] = {
    "data": Group(
        "generated data",
        {
            "keras.src.datasets.mnist": _keras_digits,
            "tf_keras.src.datasets.mnist": _keras_digits,
            "mxnet.test_utils": _mxnet_download,
            "urllib.request": _words_download,
        },
        {**_TORCHVISION, "gluoncv": dict, "gluoncv.model_zoo": _gluon_models},
    ),
    "short": Group(
        "fewer steps",
        {
            f"{_KERAS}.training": _short_fit,
            f"{_KERAS}.training_v1": _short_fit,
            "tensorflow.python.data.ops.dataset_ops": _short_take,
            "tensorflow.python.training.basic_session_run_hooks": _short_hook,
        },
        begun=_short_range,
    ),
    "tensorflow 1": Group("tensorflow is tensorflow.compat.v1", begun=_see_tensorflow_1),
    "no gpu": Group(
        "cuda() does nothing, mx.gpu is mx.cpu", {"torch": _torch_without_gpu, "mxnet": _mxnet_without_gpu}
    ),
    "mxnet 2": Group("mx.gluon.metric is mx.metric", {"mxnet": _mxnet_2}),
    "tensorboard": Group(
        "no logs for TensorBoard",
        {"pytorch_lightning.loggers": _logs_as_tables},
        {"torch.utils.tensorboard": _summary_writer},
    ),
}


class _Made(importlib.abc.Loader):
    def __init__(self, make: Callable[[], dict[str, Any]]) -> None:
        self._make = make

    def exec_module(self, module: Any) -> None:
        vars(module).update(self._make())


class _Changed(importlib.abc.Loader):
    """Loads a module as its own loader does, and changes it then."""

    def __init__(self, loader: Any, change: Callable[[Any], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # what reads resources beside the module asks for it
        self._loader.exec_module(module)
        self._change(module)


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, groups: Sequence[Group]) -> None:
        self._groups = groups
        self._asked: set[str] = set()  # names for which the other finders, which may ask in their turn, are asked now

    def find_spec(self, name: str, path: Any, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        for group in self._groups:
            if name in group.made:
                return importlib.machinery.ModuleSpec(name, _Made(group.made[name]), is_package=True)
        changes = [group.changed[name] for group in self._groups if name in group.changed]
        if not changes or name in self._asked:
            return None
        self._asked.add(name)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asked.remove(name)
        if spec is not None:
            for change in changes:
                spec.loader = _Changed(spec.loader, change)
        return spec


def install(names: Sequence[str]) -> None:
    """Prepare this process, before its script begins, for the groups with these names."""
    groups = [GROUPS[name] for name in names]
    sys.meta_path.insert(0, _Finder(groups))
    for group in groups:
        for name, change in group.changed.items():
            if name in sys.modules:
                change(sys.modules[name])
        if group.begun is not None:
            group.begun()
