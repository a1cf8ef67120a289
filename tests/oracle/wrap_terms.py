"""Policies of torch together with the text that means the same to `fsdpckpt units --policy`, for units.py."""

import functools

from torch.distributed.fsdp import wrap


def term(kind, leaf=None, exclude=None, modules=None, **options):
    """A policy of torch, and the same as text. With leaf and exclude classes, a policy that does not have them is a lambda.

    `modules` are the names of modules by id."""
    text = {"always": "always", "size": f"size:{options.get('least')}",
            "class": "class:" + ",".join(c.__name__ for c in options.get("classes", ())),
            "name": "name:" + ",".join(options.get("names", ()))}[kind]
    for word, classes in (("leaf", leaf), ("exclude", exclude)):
        text += "" if classes is None else f"+{word}:" + ",".join(sorted(c.__name__ for c in classes))

    if kind == "size":
        sets = {k: set(v) for k, v in (("force_leaf_modules", leaf), ("exclude_wrap_modules", exclude)) if v is not None}
        return text, functools.partial(wrap.size_based_auto_wrap_policy, min_num_params=options["least"], **sets)
    if kind == "always":
        wanted = lambda module: True
    elif kind == "class":
        wanted = lambda module: isinstance(module, tuple(options["classes"]))
    else:
        wanted = lambda module: modules[id(module)] in options["names"]
    if leaf is None and exclude is None:
        return text, {"always": wrap.always_wrap_policy,
                      "class": functools.partial(wrap.transformer_auto_wrap_policy,
                                                 transformer_layer_cls=set(options.get("classes", ()))),
                      "name": functools.partial(wrap.lambda_auto_wrap_policy, lambda_fn=wanted)}[kind]

    def policy(module, recurse, nonwrapped_numel):
        return not isinstance(module, tuple(leaf or ())) if recurse else \
            wanted(module) and not isinstance(module, tuple(exclude or ()))
    return text, policy


def random_term(rng, model, seen, modules):
    """A term with classes and names that occur in the state dict: `seen` are these modules."""
    classes = sorted({type(m) for m in model.modules() if seen.get(id(m))}, key=lambda c: c.__name__)
    some = lambda: rng.choice([None, rng.sample(classes, rng.randint(0, min(2, len(classes))))])
    kind = rng.choice(("always", "size", "class", "name"))
    return term(kind, leaf=some(), exclude=some(), least=rng.choice((1, 8, 64, 100, 500, 4000)),
                classes=rng.sample(classes, rng.randint(1, min(2, len(classes)))),
                names=rng.sample([n for n in seen.values() if n], 2), modules=modules)
