"""The FSDP units that `fsdpckpt units` derives from names, against torch's own policies on real modules.

units.py FSDPCKPT: the models are nn.Modules, and the command sees only names, shapes and classes.
"""

import atexit
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import warnings

try:
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
    from torch.distributed.fsdp._wrap_utils import _get_managed_param_to_fqn, _get_post_order_named_modules, \
        _validate_frozen_params
    from torch.distributed.fsdp import wrap
    from torch.distributed.fsdp._common_utils import _override_module_mixed_precision

    from wrap_terms import random_term, term
except ImportError as e:
    print(f"skipped: {e}")
    sys.exit(77)

TOOL = os.path.abspath(sys.argv[1])
DIR = tempfile.mkdtemp(prefix="fsdpckpt-units-")
atexit.register(shutil.rmtree, DIR)
checks = 0


def check(got, want, what):
    global checks
    checks += 1
    if got != want:
        print(f"{what}\n  got  {got}\n  want {want}")
        sys.exit(1)


def names_of(model):
    """All names of each tensor and of each module."""
    params, modules = {}, {}
    for name, p in model.named_parameters(remove_duplicate=False):
        params.setdefault(id(p), []).append(name)
    for name, m in model.named_modules(remove_duplicate=False):
        modules.setdefault(id(m), []).append(name)
    return params, modules


def describe(model, frozen=(), ignored=()):
    """A schema of the state dict, and the --classes file with what names do not show."""
    buffers = {n for n, _ in model.named_buffers(remove_duplicate=False)}
    tensors = [{"name": n, "dtype": str(t.dtype).removeprefix("torch."), "shape": list(t.shape)}
               for n, t in model.state_dict(keep_vars=True).items()]
    with open(os.path.join(DIR, "model.json"), "w") as f:
        json.dump({"fsdpckpt": "schema", "schema": 1, "tensors": tensors}, f)
    params, modules = names_of(model)
    info = {n: [c.__name__ for c in type(m).__mro__ if c is not object]
            for n, m in model.named_modules(remove_duplicate=False) if n}
    info["$shared"] = [g for g in list(modules.values()) + list(params.values()) if len(g) > 1]
    info["$frozen"] = list(frozen)
    info["$ignored"] = list(ignored)
    info["$buffers"] = sorted(buffers)
    with open(os.path.join(DIR, "classes.json"), "w") as f:
        json.dump(info, f)


def run(*args):
    p = subprocess.run([TOOL, "units", "model.json", "--classes", "classes.json", *args], cwd=DIR, text=True,
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    return p


def units(*args):
    p = run(*args, "--json")
    if p.returncode:
        print(args, p.stderr)
        sys.exit(1)
    return json.loads(p.stdout)


def policy_file(policy):
    path = os.path.join(DIR, "policy.json")
    with open(path, "w") as f:
        json.dump(policy, f)
    return path


def modules_in_order(out):
    return [u["module"] for u in out["units"][:-1]]


def known(model, names):
    """The modules that appear in a state dict. A ReLU, for example, does not."""
    prefixes = {n[:i] for n in model.state_dict() for i, c in enumerate(n) if c == "."}
    return [n for n in names if n in prefixes]


def applied(model, targets):
    """The target modules in the order of torch's post-order pass."""
    names = {id(m): n for n, m in model.named_modules()}
    order = []
    wrap._post_order_apply(model, lambda m: order.append(names[id(m)]) if m in targets and m is not model else None)
    return known(model, order)


def sized(model, **kwargs):
    """The modules that size_based_auto_wrap_policy wraps, in order."""
    return wrapped(model, functools.partial(wrap.size_based_auto_wrap_policy, **kwargs))


class Attention(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.wq, self.wk, self.wo = (nn.Linear(d, d, bias=False) for _ in range(3))


class Block(nn.Module):
    def __init__(self, d, scale=True):
        super().__init__()
        self.norm1 = nn.LayerNorm(d)
        self.attn = Attention(d)
        self.mlp = nn.Sequential(nn.Linear(d, 4 * d), nn.ReLU(), nn.Linear(4 * d, d))
        if scale:
            self.scale = nn.Parameter(torch.ones(1))


class SpecialBlock(Block):
    pass


class Transformer(nn.Module):
    def __init__(self, d=8, layers=12, tied=False):
        super().__init__()
        self.embed = nn.Embedding(50, d)
        self.layers = nn.ModuleList(SpecialBlock(d) if i == 3 else Block(d) for i in range(layers))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, 50, bias=False)
        self.register_buffer("inv_freq", torch.ones(d))
        if tied:
            self.head.weight = self.embed.weight


class Vision(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleDict({"a": nn.Linear(64, 64), "b": nn.Linear(32, 8)})
        self.attn = nn.MultiheadAttention(32, 4)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.big = nn.ModuleList([nn.Linear(64, 64), nn.ModuleList([nn.Linear(64, 32), nn.Linear(32, 64)])])


def by_class():
    for model, classes in ((Transformer(), {Block}), (Transformer(), {Block, nn.Linear}), (Transformer(), {SpecialBlock}),
                           (Transformer(), {nn.Module}), (Vision(), {nn.Linear, nn.modules.batchnorm._BatchNorm})):
        describe(model)
        targets = wrap.ModuleWrapPolicy(classes)._run_policy(model, set(), {})
        out = units("--policy", "class:" + ",".join(c.__name__ for c in classes))
        check(modules_in_order(out), applied(model, targets), f"ModuleWrapPolicy({classes})")
    describe(Transformer())
    check(modules_in_order(units()), [f"layers.{i}" for i in range(12)], "blocks")


def ignoring():
    model = Transformer()
    ignored = set(model.layers[2].modules()) | {model.norm}
    describe(model, ignored=["layers.2", "norm"])
    targets = wrap.ModuleWrapPolicy({Block, nn.LayerNorm})._run_policy(model, ignored, {})
    out = units("--policy", "class:Block,LayerNorm")
    check(modules_in_order(out), applied(model, targets), "ignored modules")
    held = {p["name"] for u in out["units"] for p in u["parameters"]}
    check(sorted(held | set(out["ignored"])), sorted(n for n, _ in model.named_parameters()), "nothing is lost")
    check("norm.weight" in out["ignored"] and "layers.2.norm1.bias" in out["ignored"], True, "ignored names")


def custom():
    model = Transformer()
    describe(model)
    want = {n: ({"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if n == "head" else
                {} if n == "norm" else n != "layers.1")
            for n, m in model.named_modules() if n in ("head", "norm") or isinstance(m, Block)}
    names = {id(m): n for n, m in model.named_modules()}
    root = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
    policy = wrap.CustomPolicy(lambda m: want.get(names[id(m)], False))
    targets = policy._run_policy(model, set(), root)
    out = units("--policy", policy_file({
        "class:Block": True, "layers.1": False, "norm": {}, "head": {"sharding_strategy": "SHARD_GRAD_OP"},
        "$root": {"sharding_strategy": "HYBRID_SHARD", "use_orig_params": True}}))
    check(modules_in_order(out), applied(model, targets), "CustomPolicy")
    by_name = {names[id(m)]: kwargs for m, kwargs in targets.items()}
    for u in out["units"][:-1]:
        check(u["options"]["sharding_strategy"], by_name[u["module"]]["sharding_strategy"].name, u["module"])
        check(u["options"]["use_orig_params"], by_name[u["module"]]["use_orig_params"], u["module"])
    for wrong in (3, "yes", None):
        try:
            wrap.CustomPolicy(lambda m: wrong)._run_policy(model, set(), root)
            refused = False
        except ValueError:
            refused = True
        p = run("--policy", policy_file({"layers.*": wrong}))
        check((p.returncode == 2, p.stdout), (refused, ""), f"a policy that says {wrong!r}")


def compare_sized(model, least, what):
    """Returns True if the units split a shared parameter, which must be refused."""
    want = sized(model, min_num_params=least)
    groups = [g for g in names_of(model)[0].values() if len(g) > 1]
    unit = lambda name: max((u for u in want if name.startswith(u + ".")), key=len, default="")
    split = any(len({unit(n) for n in g}) > 1 for g in groups)
    p = run("--policy", f"size:{least}", "--json")
    check((p.returncode, p.stderr.count("one shared parameter")), (2, 1) if split else (0, 0), f"{what}: {p.stderr}")
    if not split:
        out = json.loads(p.stdout)
        check(modules_in_order(out), want, what)
        check({p["name"]: u["module"] for u in out["units"] for p in u["parameters"]},
              {n: unit(n) for n, _ in model.named_parameters()}, f"{what}: parameters")
    return split


def by_size():
    for model in (Transformer(), Transformer(tied=True), Vision()):
        describe(model)
        total = sum(p.numel() for p in model.parameters())
        for least in [1, 2, 9, 64, 100, 200, 500, 600, 1000, 4000, total - 1, total, total + 1]:
            compare_sized(model, least, f"{type(model).__name__}, size:{least}")


def wrapped(model, policy):
    """The modules that torch's _recursive_wrap wraps, in order."""
    names = {id(m): n for n, m in model.named_modules()}
    order = []

    def record(module):
        order.append(names[id(module)])
        return module  # the tree stays unchanged

    wrap._recursive_wrap(module=model, auto_wrap_policy=policy, wrapper_cls=record, ignored_modules=set(),
                         ignored_params=set(), only_wrap_children=True)
    return known(model, order)


def compare_terms(model, terms, what, norms=()):
    """Compares _or_policy of some terms with the text, on the command line and in a file. With mixed precision, `norms` are
    wrapped individually."""
    policies = [p for _, p in terms]
    text = "+".join(t for t, _ in terms)
    if norms:
        policies.append(functools.partial(wrap._wrap_module_cls_individually, module_classes=norms))
        given = policy_file({"$policy": text, "$root": {"mixed_precision": {"param_dtype": "bfloat16"}},
                             "$fp32_classes": [c.__name__ for c in norms]})
    else:
        given = policy_file({"$policy": text})
        check(run("--policy", text, "--json").stdout.replace(text, given), run("--policy", given, "--json").stdout,
              f"{what}: a file says the same")
    policy = policies[0] if len(policies) == 1 else functools.partial(wrap._or_policy, policies=policies)
    check(modules_in_order(units("--policy", given)), wrapped(model, policy), f"{what}: {text}")


def terms():
    rng = random.Random(3)
    for model in (Transformer(), Vision()):
        describe(model)
        names = {id(m): n for n, m in model.named_modules()}
        seen = {m: n for m, n in names.items() if n in known(model, names.values())}
        for kind in ("always", "size", "class", "name"):
            compare_terms(model, [term(kind, least=100, classes=[nn.Linear], names=list(seen.values())[:3], modules=names)], kind)
        for i in range(20):
            chosen = [random_term(rng, model, seen, names) for _ in range(rng.randint(1, 3))]
            norms = {nn.LayerNorm} if isinstance(model, Transformer) else {nn.modules.batchnorm._BatchNorm}
            compare_terms(model, chosen, f"{type(model).__name__} {i}", norms if i % 4 == 0 else ())


def mixed_precision():
    model = Vision()
    describe(model)
    with warnings.catch_warnings(record=True):
        targets = wrap.ModuleWrapPolicy({nn.ModuleDict})._run_policy(model, set(), {"mixed_precision": "yes"})
        wrap._run_mixed_precision_override_policy(model, {nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention}, set(),
                                                  {"mixed_precision": "yes"}, targets)
        _override_module_mixed_precision(model, {nn.modules.batchnorm._BatchNorm, nn.MultiheadAttention})
    out = units("--policy", policy_file({"class:ModuleDict": True, "$fp32_classes": ["_BatchNorm", "MultiheadAttention"],
                                         "$root": {"mixed_precision": {"param_dtype": "bfloat16"}}}))
    # BatchNorm1d without affine parameters still has buffers, so it is also a unit.
    check(modules_in_order(out), applied(model, targets), "mixed precision override")
    names = {n: m for n, m in model.named_modules()}
    for u in out["units"][:-1]:
        mixed = targets[names[u["module"]]]["mixed_precision"] is not None
        check(u["options"]["mixed_precision"] is not None, mixed, u["module"])
    check(out["units"][-1]["options"]["mixed_precision"],
          {"param_dtype": "bfloat16", "reduce_dtype": "bfloat16", "buffer_dtype": None, "keep_low_precision_grads": False,
           "cast_forward_inputs": False, "cast_root_forward_inputs": True}, "the root's stays")
    check([u["module"] for u in out["units"] if u["options"]["fp32_inputs"]],
          [u["module"] for u in out["units"][:-1] if hasattr(names[u["module"]], "_wrap_overrides")], "the hooks")
    check(sorted(out["overridden_classes"]), ["BatchNorm1d", "BatchNorm2d", "MultiheadAttention"], "the overridden ones")


def mixed_precision_by_default():
    """Batch norms are units without mixed precision unless the policy says otherwise, as in MixedPrecision()."""
    ignored = MixedPrecision()._module_classes_to_ignore
    root = {"$root": {"mixed_precision": {"param_dtype": "bfloat16"}}}
    model = Vision()
    describe(model)
    targets = wrap.ModuleWrapPolicy({nn.ModuleDict})._run_policy(model, set(), {"mixed_precision": "yes"})
    wrap._run_mixed_precision_override_policy(model, ignored, set(), {"mixed_precision": "yes"}, targets)
    out = units("--policy", policy_file({"class:ModuleDict": True} | root))
    check(modules_in_order(out), applied(model, targets), "mixed precision by default")
    check(sorted(out["overridden_classes"]), ["BatchNorm1d", "BatchNorm2d"], "the overridden ones by default")
    none = units("--policy", policy_file({"class:ModuleDict": True, "$fp32_classes": []} | root))
    check(none["overridden_classes"], [], "none are overridden")
    full = units("--policy", policy_file({"class:ModuleDict": True}))
    check((modules_in_order(full), full["overridden_classes"]), (modules_in_order(none), []), "full precision")


def managed(model, targets):
    """The parameters that each unit would manage, according to torch."""
    seen, held = set(), {}
    for name, module in _get_post_order_named_modules(model):
        if module in targets or module is model:
            held[name] = sorted(_get_managed_param_to_fqn(module, set(), seen, name).values())
    return held


def frozen():
    for use_orig_params in (False, True):
        model = Transformer()
        for p in model.layers[4].attn.parameters():
            p.requires_grad = False
        model.layers[5].requires_grad_(False)
        describe(model, frozen=["layers.4.attn", "layers.5"])
        targets = wrap.ModuleWrapPolicy({Block})._run_policy(model, set(), {})
        text = None
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            try:
                _validate_frozen_params(model, set(targets), set(), use_orig_params)
            except ValueError as e:
                text = str(e)
        text = text or str(seen[0].message)
        root = policy_file({"class:Block": True, "$root": {"use_orig_params": use_orig_params}})
        p = run("--policy", root)
        words = lambda s: sorted(s.replace("[", " ").replace("]", " ").replace(",", " ").split())
        want = words(text)
        check(p.returncode, 0 if use_orig_params else 2, p.stderr)
        got = words(p.stderr.removeprefix("fsdpckpt: ").removeprefix("warning: "))
        check(got, want, "torch's words")
        model.layers[4].requires_grad_(False)
        describe(model, frozen=["layers.4", "layers.5"])
        check(run("--policy", root).returncode, 0, "uniform")
    describe(Transformer(), frozen=["embed"])
    p = run()
    check((p.returncode, "the root module has both parameters" in p.stderr), (2, True), p.stderr)


def shared():
    model = Transformer(tied=True)
    describe(model)
    out = units()
    check(out["shared"], {"head.weight": "embed.weight"}, "tied")
    check([p["name"] for u in out["units"] for p in u["parameters"]].count("head.weight"), 0, "once")
    check(out["numel"], sum(p.numel() for p in model.parameters()), "counted once")
    for policy, good in (("class:Embedding", False), ("class:Embedding,Linear", False), ("class:Block", True)):
        p = run("--policy", policy)
        check(p.returncode, 0 if good else 2, p.stderr)
        if not good:
            check("'embed.weight' and 'head.weight'" in p.stderr and "'the root'" in p.stderr, True, p.stderr)
    # A module in two places is visited once, at the first.
    model = nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "c": nn.Linear(3, 3)})
    model["b"] = nn.Sequential(model["a"][0], nn.Linear(4, 4))
    describe(model)
    targets = wrap.ModuleWrapPolicy({nn.Linear})._run_policy(model, set(), {})
    out = units("--policy", "class:Linear")
    check(modules_in_order(out), applied(model, targets), "a shared module")
    want = managed(model, targets)
    want["a.0"] = [n.replace("b.0", "a.0") for n in want.pop("b.0")]  # torch visits the modules from the end
    check({u["module"]: sorted(p["name"] for p in u["parameters"]) for u in out["units"]}, want, "its parameters")
    describe(model)
    p = run("--policy", policy_file({"a": True}))
    check(p.returncode, 2, "below the common ancestor")


def saved():
    """Real files: in a .pt file, tied weights share their storage and are detected without further input."""
    model = Transformer(tied=True)
    torch.save(model.state_dict(), os.path.join(DIR, "model.pt"))
    p = subprocess.run([TOOL, "units", "model.pt", "--json"], cwd=DIR, text=True, stdout=subprocess.PIPE, check=True)
    out = json.loads(p.stdout)
    check(out["shared"], {"head.weight": "embed.weight"}, "tied in a file")
    check(out["numel"], sum(p.numel() for p in model.parameters()), "counted once in a file")
    # Views of one storage are not the same tensor.
    base = torch.arange(64.0)
    views = {"a.w": base[:16].view(4, 4), "b.w": base[16:32].view(4, 4), "c.w": base[:16].view(4, 4).t(),
             "d.w": base[16:32].view(2, 8), "e.w": base[:16].view(4, 4), "f.w": base[:16].view(4, 4).t()}
    torch.save(views, os.path.join(DIR, "views.pt"))
    p = subprocess.run([TOOL, "units", "views.pt", "--json"], cwd=DIR, text=True, stdout=subprocess.PIPE, check=True)
    check(json.loads(p.stdout)["shared"], {"e.w": "a.w", "f.w": "c.w"}, "views")


def real_fsdp():
    """Compares with the flat parameters that FSDP makes, in its order."""
    dist.init_process_group("gloo", init_method=f"file://{DIR}/rendezvous", rank=0, world_size=1)
    for tied in (False, True):
        model = Transformer(tied=tied)
        describe(model)
        for classes in ({Block}, {Block, Attention}):
            out = units("--policy", "class:" + ",".join(c.__name__ for c in classes))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                model = Transformer(tied=tied)
                names = {id(m): n for n, m in model.named_modules()}
                fsdp = FSDP(model, auto_wrap_policy=wrap.ModuleWrapPolicy(classes), device_id=torch.device("cpu"))
            want = {}
            for m in FSDP.fsdp_modules(fsdp):
                prefix = names[id(m.module)]
                fqns = m._flat_param._fqns if m._has_params else []
                fqns = [n.replace("_fsdp_wrapped_module.", "") for n in fqns]
                want[prefix] = [f"{prefix}.{n}" if prefix else n for n in fqns]
            got = {u["module"]: [p["name"] for p in u["parameters"]] for u in out["units"]}
            # FSDP lists a shared parameter under the name in the first module, and so do we.
            check(got, want, f"flat parameters, {classes}, tied {tied}")
    dist.destroy_process_group()


class A(nn.Module):
    pass


class B(A):
    pass


class C(nn.Module):
    pass


def random_tree(rng, depth=0):
    kinds = [A, B, C, nn.ModuleList, nn.ModuleDict, nn.MultiheadAttention] if 0 < depth < 4 else [A, B, C]
    kind = rng.choice(kinds)
    if kind is nn.MultiheadAttention:
        return nn.MultiheadAttention(2 * rng.randint(1, 3), 2)
    if kind is nn.ModuleList:
        return nn.ModuleList(random_tree(rng, depth + 1) for _ in range(rng.randint(1, 12)))
    m = kind()
    own = 0 if kind is nn.ModuleDict else rng.randint(depth >= 4, 2)
    for i in range(own):
        m.register_parameter(f"p{i}", nn.Parameter(torch.zeros([rng.randint(0, 4) for _ in range(rng.randint(0, 2))])))
    for i in range(0 if depth >= 4 else rng.randint(1, 3)):
        m.add_module(f"m{i}", random_tree(rng, depth + 1))
    return m


def random_trees():
    refused = [0, 0]
    for seed in range(40):
        rng = random.Random(seed)
        model = A()
        for i in range(3):
            model.add_module(f"t{i}", random_tree(rng))
        modules = list(model.modules())
        owners = [m for m in modules if isinstance(m, (A, C)) and m._parameters]
        for i in range(rng.randint(0, 3)):  # a tensor in two modules
            if len(owners) > 1:
                x, y = rng.sample(owners, 2)
                y.register_parameter(f"s{i}", next(iter(x._parameters.values())))
        describe(model)
        total = sum(p.numel() for p in model.parameters())
        for least in {1, 2, 5, 10, 30, max(total // 4, 1), max(total // 2, 1)}:
            refused[compare_sized(model, least, f"tree {seed}, size:{least}")] += 1
    check(min(refused) > 20, True, f"both happened: {refused}")


for test in (by_class, ignoring, custom, by_size, terms, mixed_precision, mixed_precision_by_default, frozen,
             shared, saved, real_fsdp, random_trees):
    test()
print(f"{checks} checks")
