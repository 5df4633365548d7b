"""Small configs and inputs of the model types that policies list: data, one YAML file per family.

A type without an entry gets the settings that all small models share, as far as its config knows them
(``configs.py``), and the labels of its heads (``heads.yaml``). An entry says what it needs besides::

    types:
      qwen2_moe:
        flat: {with: [experts, sliding], mlp_only_layers: [0]}
        variants: {with: tied, no-biases: {qkv_bias: false}}
        without: {"a part of the model, not a head": [Qwen2MoePart]}
        double: why it is compared in float64
        inputs:
          - pixel_values: normal(2, 3, config.image_size, config.image_size)
          - {for: "*ForSequenceClassification", labels: "draw(0, 3, 2)"}

``form.Kind`` explains ``settings``, ``variants``, ``without``, ``double``, ``inside``, ``generates``, ``crosses``.

**Configs.** ``settings``: fields beside the shared ones; a head's place and the kind of head change some.
``flat``, ``known``, ``make``: three ways to say the whole config (``configs.config_of``); with one of them types have
no variant with the embeddings tied the other way by themselves. Text of nothing but ``heads``, ``kv_heads``,
``vocab`` and numbers is an expression: ``8 * heads``. A mapping inside ``make`` with ``from: TYPE`` is the config that
TYPE's entry makes, with changes; with ``is: TYPE``, a flat config of TYPE. Variants change what the entry says, also
inside of mappings; ``only: true`` in one drops what it would change.

**Fragments.** ``with: name`` or ``with: [names]``, in any mapping, takes what ``shared`` of the file or
``shared.yaml`` has by that name; what comes later wins. In a list, ``{with: name}`` takes all items of a list.

**Inputs** are steps, one after another. A step names what the batch gets: an expression over what is in the batch,
``config`` and the functions of ``recipes.py``; or a list, which becomes a tensor; or a number or flag. ``draw(low,
high, *shape)`` and ``normal(*shape)`` are random, and a tensor in the place of a shape stands for its own. ``_`` is
not given to the model. ``for``, ``not``: patterns of the heads that a step is for; ``when``: fields of the config;
``if``: a name in the batch. ``only``, ``drop``: names that stay, or go. ``steps``: more steps under one condition. A
step of text calls a function of ``inputs.py``: what needs code. ``labels`` and ``cross`` of an entry stand in the
place of those of ``heads.yaml``.

Words of Python that are no names (``for``, ``with``, ``from``, ``is``, ``not``, ``if``) can be no field of a config.
"""
