r"""Architectures as people write them: from packages, and by hand, with random weights.

pip install --no-deps keras-cv-attention-models==1.4.3 segmentation-models==1.0.1 \
        keras-unet-collection==0.1.13 efficientnet==1.1.1 keras-applications image-classifiers \
        keras-tcn==3.5.7
pip install scikit-image
python -m benchmarks.wild
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

__all__ = ["builders"]

Builder = Callable[[], Any]

SIZE = 64
"""Height and width of images."""

ATTENTION_MODELS = {
    "mobilenetv3_family": (
        *("MobileNetV3Small100", "MobileNetV3Large100", "MobileNetV3Small075", "FBNetV3B"),
        "LCNet050",
    ),
    "efficientnet": ("EfficientNetV1B0", "EfficientNetV2B0", "EfficientNetEdgeTPUSmall"),
    "resnet_family": ("ResNet50D", "ResNeXt50", "ResNet51Q", "RegNetY040", "RegNetZB16"),
    "resnest": ("ResNest50",),
    "convnext": ("ConvNeXtTiny", "ConvNeXtV2Atto"),
    "coatnet": ("CoAtNet0",),
    "cspnext": ("CSPNeXtTiny",),
    "edgenext": ("EdgeNeXt_XX_Small",),
    "fasternet": ("FasterNetT0",),
    "gcvit": ("GCViT_XXTiny",),
    "ghostnet": ("GhostNetV2_100",),
    "hornet": ("HorNetTiny",),
    "inceptionnext": ("InceptionNeXtTiny",),
    "levit": ("LeViT128S",),
    "mlp_family": ("MLPMixerS32", "ResMLP12", "GMLPTiny16"),
    "mobilevit": ("MobileViT_XXS", "MobileViT_V2_050"),
    "moganet": ("MogaNetXtiny",),
    "nfnets": ("NFNetL0",),
    "pvt": ("PVT_V2B0",),
    "repvit": ("RepViT_M09",),
    "swin_transformer_v2": ("SwinTransformerV2Tiny_window8",),
    "tinyvit": ("TinyViT_5M",),
    "uniformer": ("UniformerSmall32",),
    "vanillanet": ("VanillaNet5",),
    "volo": ("VOLO_d1",),
    "yolov8": ("YOLOV8_N",),
    "yolox": ("YOLOXNano",),
    "yolor": ("YOLOR_CSP",),
    "efficientdet": ("EfficientDetLite0",),
    "efficientformer": ("EfficientFormerL1",),
    "caformer": ("CAFormerS18",),
    "beit": ("ViTTinyPatch16",),
    "cmt": ("CMTTiny",),
    "davit": ("DaViT_T",),
}
"""Module of keras-cv-attention-models -> constructors."""

WHOLE = ("YOLO", "EfficientDet")
"""Beginnings of names of models that have no classifier."""


def _attention_model(module: str, name: str) -> Any:
    import importlib

    result = importlib.import_module(f"keras_cv_attention_models.{module}")
    options = {} if name.startswith(WHOLE) else {"num_classes": 10, "classifier_activation": None}
    if name.startswith("VOLO"):
        del options["classifier_activation"]  # It has none.
    return getattr(result, name)(input_shape=(SIZE, SIZE, 3), pretrained=None, **options)


SEGMENTATION = (
    *(("Unet", "resnet18"), ("Unet", "mobilenetv2"), ("FPN", "efficientnetb0")),
    *(("Linknet", "resnet34"), ("FPN", "seresnet18"), ("Unet", "densenet121")),
)
"""Architectures of segmentation-models and their backbones."""


def _segmentation(kind: str, backbone: str) -> Any:
    import segmentation_models

    make = getattr(segmentation_models, kind)
    return make(backbone, input_shape=(SIZE, SIZE, 3), encoder_weights=None, classes=2)


TCNS: dict[str, dict[str, Any]] = {
    "last": {"use_batch_norm": True},
    "sequences": {"use_layer_norm": True, "return_sequences": True},
}
"""What networks of keras-tcn give -> options."""


def _tcn(options: dict[str, Any]) -> Any:
    from tcn import TCN

    from keras_qat.keras2.backend import keras

    inputs = keras.Input((64, 4))
    x = TCN(16, dilations=(1, 2, 4), **options)(inputs)
    return keras.Model(inputs, keras.layers.Dense(5)(x))


UNETS: dict[str, dict[str, Any]] = {
    "unet_2d": {"n_labels": 2},
    "vnet_2d": {"n_labels": 2, "res_num_max": 2, "pool": False, "unpool": False},
    "unet_plus_2d": {"n_labels": 2},
    "r2_unet_2d": {"n_labels": 2},
    "att_unet_2d": {"n_labels": 2},
    "resunet_a_2d": {"n_labels": 2, "dilation_num": [1, 3]},
    "u2net_2d": {"n_labels": 2, "filter_num_down": [16, 16, 16]},
    "transunet_2d": {
        **{"n_labels": 2, "stack_num_down": 1, "stack_num_up": 1, "embed_dim": 32, "num_mlp": 32},
        **{"num_heads": 2, "num_transformer": 1},
    },
    "unet_3plus_2d": {"n_labels": 2, "filter_num_skip": "auto", "filter_num_aggregate": "auto"},
}
"""Constructor of keras-unet-collection -> its options."""


def _unet(name: str, options: dict[str, Any]) -> Any:
    from keras_unet_collection import models

    filters = options.get("filter_num_down", [16, 32, 64])
    if name in ("u2net_2d", "unet_3plus_2d"):
        return getattr(models, name)(
            **{**options, "input_size": (SIZE, SIZE, 3), "filter_num_down": filters}
        )
    return getattr(models, name)((SIZE, SIZE, 3), filters, **options)


def builders() -> dict[str, Builder]:
    """All architectures by name."""
    os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")
    os.environ.setdefault("SM_FRAMEWORK", "tf.keras")
    from benchmarks.wild.by_hand import BY_HAND

    result: dict[str, Builder] = {
        f"kecam {name}": partial(_attention_model, module, name)
        for module, names in ATTENTION_MODELS.items()
        for name in names
    }
    result |= {f"sm {' '.join(item)}": partial(_segmentation, *item) for item in SEGMENTATION}
    result |= {f"kuc {name}": partial(_unet, name, options) for name, options in UNETS.items()}
    result |= {f"tcn {name}": partial(_tcn, options) for name, options in TCNS.items()}
    return result | BY_HAND
