"""What single layers of a model have of their own, as transformers 5.24.0 writes it: a config's `per_layer_config` maps
the number of a layer to the fields in which it differs from the others.
"""

from __future__ import annotations

from dataclasses import replace

from kvpage.models.reading import Family, Reading, refuse

PER_LAYER = "per_layer_config"
_LEFT_OUT = "skip"


def check_per_layer(reading: Reading, family: Family, model_type: str) -> None:
    """Raises `SpecInvalid` where layers of the config differ in a way that is not read."""
    config = reading.config
    layers = config.child(PER_LAYER)
    if layers is None or not layers.values:
        return
    if not family.per_layer:
        raise refuse(config, PER_LAYER, f"layers of their own sizes are not read of a {model_type} model")
    last = reading.num_layers() - 1
    known = {str(index) for index in range(last + 1)}
    for number in layers.values:
        if number not in known:
            raise config.fault(PER_LAYER, f'{number!r} is no layer; the layers are "0" to "{last}"')
        own = layers.required_child(number)
        if own.has(_LEFT_OUT):
            raise refuse(own, _LEFT_OUT, "layers without some of their parts are not read")


def of_layer(reading: Reading, index: int) -> Reading:
    """The same with the fields of layer `index` in the place of the model's."""
    layers = reading.config.child(PER_LAYER)
    own = None if layers is None else layers.child(str(index))
    return reading if own is None else replace(reading, config=reading.config.with_own(own))
