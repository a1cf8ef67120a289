"""Makes tests/corpus/recipes: small models before and after the converter of their own package.

usage: make_recipes.py OUT [CASE...]

Each case is a folder with from.safetensors, to.safetensors and config.json; every element of a model has other bits. What
made them: torchtitan 0.3.0 (Llama3StateDictAdapter, Qwen3StateDictAdapter) and 0.2.2 (torchtitan-0.2-*), litgpt 0.5.13 (convert_lit_checkpoint), nanoGPT
at commit 3adf61e (GPT.from_pretrained; NANOGPT names the folder of its model.py) with transformers 5.23.0,
convert_llama_weights_to_hf of transformers 4.44.2, the last wheel series that has it, save_pretrained of transformers 5.23.0
(fused experts), the mappings of megatron-bridge 0.3.1 with megatron-core 0.16.1, convert_state_to_hf of ai2-olmo-core 3.0.0, and
ai2-olmo 0.6.0 with the scripts of allenai/OLMo at commit 59a53e3 (OLMO_SCRIPTS names the folder with convert_olmo2_to_hf.py), and
examples/llama of huggingface/nanotron at commit 2411b02 (NANOTRON names its folder) with transformers 5.24.0.
"""

import importlib
import importlib.abc
import importlib.machinery
import inspect
import json
import os
import re
import sys
import tempfile
import unittest.mock

import torch
from safetensors.torch import load_file, save_file

LLAMA = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "num_attention_heads": 4,
         "num_key_value_heads": 2, "num_hidden_layers": 2, "intermediate_size": 24, "vocab_size": 32,
         "tie_word_embeddings": False}


def distinct(state, dtype=torch.bfloat16):
    """The same names and shapes; no two elements have the same bits while 16 bits last."""
    at, out = 1, {}
    for name, t in state.items():
        bits = torch.arange(at, at + t.numel(), dtype=torch.int64) % 31000  # positive and finite
        out[name] = bits.to(torch.int16).view(dtype).reshape(t.shape).clone()
        at += t.numel()
    return out


def clones(state):
    return {k: v.detach().clone().contiguous() for k, v in state.items()}


def write(folder, source, target, config):
    os.makedirs(folder, exist_ok=True)
    save_file(clones(source), os.path.join(folder, "from.safetensors"))
    save_file(clones(target), os.path.join(folder, "to.safetensors"))
    if config["model_type"] != "llama" and config.get("architectures") == LLAMA["architectures"]:
        name = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "deepseek_v3": "DeepseekV3", "gpt_oss": "GptOss",
                "mixtral": "Mixtral", "llama4_text": "Llama4", "olmo": "Olmo", "olmo2": "Olmo2",
                "flex_olmo": "FlexOlmo"}[config["model_type"]]
        config = dict(config, architectures=[name + "ForCausalLM"])
    with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as f:
        json.dump(config, f, indent=1)
        f.write("\n")


def titan_model(package, layers, rope, tied, **extra):
    from torchtitan.models.common import Embedding, Linear
    init = {"weight": torch.nn.init.ones_}
    norm = layers[0].attention_norm
    return package(dim=16, vocab_size=32, enable_weight_tying=tied, layers=layers, norm=norm,
                   tok_embeddings=Embedding.Config(num_embeddings=32, embedding_dim=16, param_init=init),
                   lm_head=Linear.Config(in_features=16, out_features=32, param_init=init), **extra)


def titan_pair(adapter, config):
    with torch.device("cpu"):
        model = config.build()
    state = distinct({k: v for k, v in model.state_dict().items() if torch.is_floating_point(v)})
    if config.enable_weight_tying:
        state["lm_head.weight"] = state["tok_embeddings.weight"]
    hf = adapter(config, None).to_hf(dict(state))
    back = adapter(config, None).from_hf(dict(hf))
    dropped = set(state) - set(back)
    assert not dropped or all("moe" in k for k in dropped), dropped
    assert all(torch.equal(back[k], state[k]) for k in back)  # apart from that the converter is a bijection
    return state, hf


def titan_llama3(folder, tied):
    from torchtitan.models import llama3
    from torchtitan.models.common import ComplexRoPE
    rope = ComplexRoPE.Config(dim=4, max_seq_len=64, theta=500000, scaling="llama")
    layers = llama3._build_llama3_layers(n_layers=2, dim=16, n_heads=4, n_kv_heads=2, hidden_dim=24, rope=rope,
                                         attn_backend="flex")
    state, hf = titan_pair(llama3.Llama3StateDictAdapter, titan_model(llama3.Llama3Model.Config, layers, rope, tied))
    write(folder, state, hf, {**LLAMA, "tie_word_embeddings": tied})


def titan_qwen3(folder, moe):
    from torchtitan.models import qwen3
    from torchtitan.models.common import CosSinRoPE
    rope = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=1000000.0)
    size = {"n_layers": 2, "dim": 16, "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "rope": rope, "attn_backend": "flex"}
    layers = (qwen3._build_qwen3_moe_layers(**size, **moe) if moe else
              qwen3._build_qwen3_layers(hidden_dim=24, **size))
    state, hf = titan_pair(qwen3.Qwen3StateDictAdapter, titan_model(qwen3.Qwen3Model.Config, layers, rope, not moe))
    write(folder, state, hf, {**LLAMA, "model_type": "qwen3_moe" if moe else "qwen3", "head_dim": 8,
                              "tie_word_embeddings": not moe})


def litgpt(folder, family, model_type, name="", tied=False, **more):
    """The functions of both of LitGPT's scripts for a family, such as copy_weights_llama and copy_weights_hf_llama."""
    from litgpt import GPT, Config
    from litgpt.scripts import convert_hf_checkpoint, convert_lit_checkpoint
    config = Config(**{"name": name, "block_size": 64, "n_layer": 2, "n_embd": 16, "n_head": 4, "n_query_groups": 2,
                       "padded_vocab_size": 32, "bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
                       "intermediate_size": 24, **more})
    state, hf, back = distinct(GPT(config).state_dict()), {}, {}
    if tied:
        state["lm_head.weight"] = state["transformer.wte.weight"]
    untie = {"untie_weights": True} if tied else {}
    getattr(convert_lit_checkpoint, "copy_weights_" + family)(config, hf, dict(state), **untie)
    reverse = getattr(convert_hf_checkpoint, "copy_weights_" + {"llama": "hf_llama"}.get(family, family))
    given = {"config": config, "qkv_weights": {}, "state_dict": back, "hf_weights": dict(hf)}
    reverse(**{k: v for k, v in given.items() if k in inspect.signature(reverse).parameters})
    back = {**({"lm_head.weight": state["lm_head.weight"]} if tied else {}), **back}
    assert set(back) == set(state) and all(torch.equal(back[k], state[k]) for k in state)
    write(folder, state, hf, {**LLAMA, "model_type": model_type, "head_dim": config.head_size, "tie_word_embeddings": tied})


def nanogpt(folder):
    sys.path.insert(0, os.environ["NANOGPT"])
    import model as nano
    import transformers
    hf = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_layer=2, n_head=2, n_embd=16, vocab_size=32, n_positions=16))
    parameters = dict(hf.named_parameters())
    values = distinct(parameters, torch.float16)
    for name, p in parameters.items():
        p.data = values[name].float()
    transformers.GPT2LMHeadModel.from_pretrained = classmethod(lambda cls, name: hf)
    full = nano.GPTConfig
    nano.GPTConfig = lambda **given: full(block_size=16, vocab_size=32, n_layer=2, n_head=2, n_embd=16, bias=True)
    state = {k: v for k, v in nano.GPT.from_pretrained("gpt2").state_dict().items() if not k.endswith(".attn.bias")}
    saved = {k: v for k, v in hf.state_dict().items() if k != "lm_head.weight"}  # as save_pretrained writes it
    write(folder, state, saved, {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16})


def meta_llama(folder):
    from transformers.models.llama import convert_llama_weights_to_hf as convert
    shapes = {"tok_embeddings.weight": (32, 16), "norm.weight": (16,), "output.weight": (32, 16)}
    for i in range(2):
        shapes.update({f"layers.{i}.attention.wq.weight": (16, 16), f"layers.{i}.attention.wk.weight": (8, 16),
                       f"layers.{i}.attention.wv.weight": (8, 16), f"layers.{i}.attention.wo.weight": (16, 16),
                       f"layers.{i}.feed_forward.w1.weight": (24, 16), f"layers.{i}.feed_forward.w2.weight": (16, 24),
                       f"layers.{i}.feed_forward.w3.weight": (24, 16), f"layers.{i}.attention_norm.weight": (16,),
                       f"layers.{i}.ffn_norm.weight": (16,)})
    state = distinct({k: torch.empty(s) for k, s in shapes.items()})
    params = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 32, "multiple_of": 8,
              "norm_eps": 1e-5, "rope_theta": 500000.0, "ffn_dim_multiplier": 0.5}
    with tempfile.TemporaryDirectory() as tmp:
        os.makedirs(os.path.join(tmp, "in"))
        torch.save({**state, "rope.freqs": torch.ones(2)}, os.path.join(tmp, "in", "consolidated.00.pth"))
        with open(os.path.join(tmp, "in", "params.json"), "w", encoding="utf-8") as f:
            json.dump(params, f)
        saved = {}
        convert.LlamaForCausalLM.from_pretrained = classmethod(lambda cls, path, **k: collect(path, saved))
        convert.write_model(os.path.join(tmp, "out"), os.path.join(tmp, "in"), "8B", llama_version="3", vocab_size=32)
    write(folder, {**state, "rope.freqs": torch.ones(2)}, saved, {**LLAMA, **params})


def collect(path, saved):
    """What the converter has written before it loads the model, without inv_freq, which transformers no longer has."""
    for name in sorted(os.listdir(path)):
        if name.endswith(".bin"):
            saved.update({k: v for k, v in torch.load(os.path.join(path, name)).items() if "inv_freq" not in k})
    config = type("Config", (), {})()
    config._name_or_path = path  # which the converter deletes
    return type("Model", (), {"config": config, "save_pretrained": lambda *a, **k: None})()


def titan_deepseek(folder, q_lora_rank):
    from torchtitan.models import deepseek_v3 as v3
    from torchtitan.models.common import ComplexRoPE
    rope = ComplexRoPE.Config(dim=4, max_seq_len=64, theta=10000.0)
    layers = v3._build_dsv3_layers(
        n_layers=2, n_dense_layers=1, dim=16, n_heads=4, q_lora_rank=q_lora_rank, kv_lora_rank=8, qk_nope_head_dim=4,
        qk_rope_head_dim=4, v_head_dim=4, mscale=0.7, dense_hidden_dim=24, moe_hidden_dim=12, num_experts=4,
        num_shared_experts=2, router_top_k=2, router_score_func="sigmoid", attn_backend="flex", moe_comm_backend="standard",
        non_blocking_capacity_factor=None, rope=rope)
    state, hf = titan_pair(v3.DeepSeekV3StateDictAdapter, titan_model(v3.DeepSeekV3Model.Config, layers, rope, False))
    write(folder, state, hf, {**LLAMA, "model_type": "deepseek_v3"})


def titan_gpt_oss(folder):
    """The adapter keeps the order of dimensions of the quantized files, so Transformers' own is made of it here. It also does
    not know the names that its model has since 0.3 (mlp1_weight_EGD), and leaves these tensors out: they get its names."""
    from torchtitan.models import gpt_oss
    from torchtitan.models.common import CosSinRoPE, Embedding, Linear
    rope = CosSinRoPE.Config(dim=8, max_seq_len=64, theta=150000.0)
    layers = gpt_oss._build_gptoss_layers(dim=16, n_layers=2, hidden_dim=12, num_experts=4, top_k=2, load_balance_coeff=1e-3,
                                          moe_comm_backend="standard", rope=rope)
    init = {"weight": torch.nn.init.ones_}
    config = gpt_oss.GptOssModel.Config(dim=16, vocab_size=32, layers=layers, norm=layers[0].attention_norm,
                                        tok_embeddings=Embedding.Config(num_embeddings=32, embedding_dim=16, param_init=init),
                                        lm_head=Linear.Config(in_features=16, out_features=32, param_init=init))
    with torch.device("cpu"):
        state = distinct({k: v for k, v in config.build().state_dict().items() if torch.is_floating_point(v)})
    def old(name):
        return re.sub(r"(mlp[12]_(weight|bias))_[A-Z]+$", r"\1", name)
    hf = gpt_oss.GptOssStateDictAdapter(config, None).to_hf({old(k): v for k, v in state.items()})
    hf = {k.removesuffix("_blocks"): v.transpose(1, 2).contiguous() if k.endswith("_blocks") else v for k, v in hf.items()}
    import transformers
    like = transformers.GptOssForCausalLM(transformers.GptOssConfig(
        hidden_size=16, vocab_size=32, num_hidden_layers=2, num_attention_heads=64, num_key_value_heads=8, head_dim=64,
        num_local_experts=4, intermediate_size=12)).state_dict()
    assert {k: v.shape for k, v in like.items()} == {k: v.shape for k, v in hf.items()}
    write(folder, state, hf, {**LLAMA, "model_type": "gpt_oss"})


def fused_experts(folder, model, config):
    """What Transformers 5 has in memory, and what it stores."""
    import transformers
    made = getattr(transformers, model + "ForCausalLM")(getattr(transformers, model + "Config")(**config)).bfloat16()
    made.load_state_dict(distinct(made.state_dict()))
    with tempfile.TemporaryDirectory() as tmp:
        made.save_pretrained(tmp)
        write(folder, made.state_dict(), load_file(os.path.join(tmp, "model.safetensors")),
              {**LLAMA, "architectures": [model + "ForCausalLM"], "model_type": made.config.model_type, **config})


def titan_02(folder, family, model, arguments, config):
    """torchtitan 0.2, whose models and adapters are in other places and have other names. Its trainer imports what is not
    needed here."""
    sys.modules.setdefault("torch.utils.tensorboard", unittest.mock.MagicMock())
    base = f"torchtitan.models.{family}.model."
    sizes = getattr(importlib.import_module(base + "args"), model + "ModelArgs")
    adapter = importlib.import_module(base + "state_dict_adapter")
    names = {"Transformer": family.capitalize(), "Qwen3Model": "Qwen3"}
    if "num_experts" in arguments:
        from torchtitan.models.moe import MoEArgs
        arguments = {**arguments, "moe_args": MoEArgs(num_experts=arguments["num_experts"], top_k=2,
                                                      num_shared_experts=arguments["num_shared_experts"])}
        del arguments["num_experts"], arguments["num_shared_experts"]
    args = sizes(dim=16, n_layers=2, vocab_size=32, max_seq_len=64, **arguments)
    args.moe_impl = "standard"  # which update_from_config sets
    module = importlib.import_module(base + "model")
    with torch.device("meta"):
        built = next(getattr(module, n) for n in (model + "Model", "Transformer") if hasattr(module, n))(args)
    state = distinct({k: torch.empty(v.shape) for k, v in built.state_dict().items() if torch.is_floating_point(v)})
    hf = getattr(adapter, names.get(model, model) + "StateDictAdapter")(args, None).to_hf(dict(state))
    if family == "gpt_oss":  # as in titan_gpt_oss
        hf = {k.removesuffix("_blocks"): v.transpose(1, 2).contiguous() if k.endswith("_blocks") else v for k, v in hf.items()}
    if family == "llama4":  # the adapter leaves dense layers out
        names = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
        hf.update({f"language_model.model.layers.{k.split('.')[1]}.feed_forward.{names[k.split('.')[-2]]}.weight": v
                   for k, v in state.items() if ".feed_forward." in k})
    write(folder, state, hf, {**LLAMA, **config})


def olmo_core(folder, family="", **arguments):
    """OLMo-core's own configuration for transformers says which model it is, but not for the Llama and Qwen3 that it imports."""
    from olmo_core.nn.attention import AttentionBackendName
    from olmo_core.nn.hf.config import get_hf_config
    from olmo_core.nn.hf.convert import convert_state_from_hf, convert_state_to_hf
    from olmo_core.nn.transformer import TransformerConfig
    make = TransformerConfig.llama_like_moe if "num_experts" in arguments else TransformerConfig.llama_like
    model = make(d_model=16, vocab_size=32, n_layers=2, n_heads=4, n_kv_heads=2, attn_backend=AttentionBackendName.torch,
                 **arguments).build(init_device="cpu")
    state = distinct(model.state_dict())
    sizes = {**LLAMA, "model_type": family, "intermediate_size": 48}
    if family:
        config = type("Config", (), sizes)()
    else:
        config = get_hf_config(model)
        sizes.update(model_type=config.model_type, **{k: getattr(config, k) for k in ("num_experts",) if hasattr(config, k)})
    hf = convert_state_to_hf(config, dict(state))
    back = convert_state_from_hf(config, dict(hf), model_type=config.model_type)
    assert set(back) == set(state) and all(torch.equal(back[k], state[k]) for k in state)
    write(folder, state, hf, sizes)


def olmo(folder, name, script, **arguments):
    """What the script for a model of the package ai2-olmo gives to from_pretrained. It imports tokenizers that transformers 5
    has elsewhere."""
    import yaml
    for module in ("gpt2.tokenization_gpt2_fast", "gpt_neox.tokenization_gpt_neox_fast"):
        sys.modules.setdefault("transformers.models." + module, unittest.mock.MagicMock())
    sys.path.insert(0, os.environ["OLMO_SCRIPTS"])
    converter = importlib.import_module(script)
    from olmo.config import ModelConfig
    from olmo.model import OLMo
    config = ModelConfig(d_model=16, n_heads=4, n_kv_heads=2, n_layers=2, mlp_ratio=4, vocab_size=32, embedding_size=32,
                         max_sequence_length=64, rope=True, include_bias=False, activation_type="swiglu", init_device="cpu",
                         weight_tying=False, eos_token_id=1, pad_token_id=1, rope_theta=10000, **arguments)
    state, saved = distinct(OLMo(config).state_dict()), {}
    with tempfile.TemporaryDirectory() as tmp:
        torch.save(state, os.path.join(tmp, "model.pt"))
        with open(os.path.join(tmp, "config.yaml"), "w", encoding="utf-8") as f:
            yaml.safe_dump({"model": json.loads(json.dumps(config.asdict(), default=str))}, f)
        getattr(converter, name + "ForCausalLM").from_pretrained = classmethod(lambda cls, path, **k: collect(path, saved))
        converter.write_model(os.path.join(tmp, "out"), tmp, include_tokenizer=False)
    write(folder, state, saved, {**LLAMA, "model_type": name.lower(), "intermediate_size": 32})


def nanotron(folder, tied=False, bias=False):
    """Both of nanotron's scripts, which take the weights of modules; building nanotron's own modules needs a GPU. The scripts have no
    biases: those of q, k and v are parts of qkv_proj.bias in this order, as in its Qwen2Attention."""
    import transformers
    for name in ("", ".config", ".models", ".models.llama", ".models.qwen", ".trainer"):
        sys.modules["nanotron" + name] = unittest.mock.MagicMock()
    sys.path.insert(0, os.environ["NANOTRON"])
    to_hf = importlib.import_module("examples.llama.convert_nanotron_to_hf")
    to_nanotron = importlib.import_module("examples.llama.convert_hf_to_nanotron")
    config = transformers.LlamaConfig(**{**LLAMA, "tie_word_embeddings": tied})
    shapes = {"token_position_embeddings.pp_block.token_embedding": (32, 16), "final_layer_norm.pp_block": (16,), "lm_head.pp_block": (32, 16)}
    for i in range(2):
        shapes.update({f"decoder.{i}.pp_block.{name}": shape for name, shape in {
            "input_layernorm": (16,), "attn.qkv_proj": (32, 16), "attn.o_proj": (16, 16), "post_attention_layernorm": (16,),
            "mlp.gate_up_proj": (48, 16), "mlp.down_proj": (16, 24)}.items()})
    state = distinct({f"model.{name}.weight": torch.empty(shape) for name, shape in shapes.items()})
    if tied:
        state["model.lm_head.pp_block.weight"] = state["model.token_position_embeddings.pp_block.token_embedding.weight"]
    model = transformers.LlamaForCausalLM(config).bfloat16()
    to_hf.convert_nt_to_hf(unittest.mock.Mock(state_dict=lambda: state), model, config)
    hf = {name: t for name, t in clones(model.state_dict()).items() if not (tied and name == "lm_head.weight")}
    back = {name: torch.nn.Parameter(torch.empty_like(t)) for name, t in state.items()}
    module = lambda name: unittest.mock.Mock(named_parameters=lambda recurse: [("weight", back[name])])
    tree = [(name.removesuffix(".weight"), module(name)) for name in back]
    to_nanotron.convert_hf_to_nt(model, unittest.mock.Mock(named_modules=lambda: tree), config)
    assert all(torch.equal(back[name], t) for name, t in state.items())
    for i in range(2 if bias else 0):
        whole = state[f"model.decoder.{i}.pp_block.attn.qkv_proj.bias"] = torch.arange(32 * i, 32 * i + 32, dtype=torch.bfloat16)
        for part, t in zip("qkv", whole.split((16, 8, 8))):
            hf[f"model.layers.{i}.self_attn.{part}_proj.bias"] = t
    write(folder, state, hf, {**LLAMA, "model_type": "qwen2" if bias else "llama", "tie_word_embeddings": tied})


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Stands for all of megatron.bridge but its mappings, which need nothing else of it."""
    real = ("conversion.param_mapping", "conversion.mapping_registry", "conversion.utils", "deepseek.common",
            "megatron.bridge.utils.common_utils")

    def find_spec(self, name, path=None, target=None):
        inside = name.removeprefix("megatron.bridge.models.")
        if name.startswith("megatron.bridge") and inside not in self.real and not inside.endswith("_bridge"):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        import megatron.core
        root = os.path.join(os.path.dirname(os.path.dirname(megatron.core.__file__)), "bridge")
        made = unittest.mock.MagicMock(name=spec.name, __spec__=spec, __name__=spec.name,
                                       __path__=[os.path.join(root, *spec.name.split(".")[2:])])
        made.MegatronModelBridge = type("Bridge", (), {
            "register_bridge": classmethod(lambda cls, **k: lambda c: c), "CONFIG_MAPPING": [], "ACTIVATION_MAPPING": {}})
        return made

    def exec_module(self, module):
        pass


def megatron(folder, bridge, model, config):
    """The mappings of Megatron-Bridge on one rank, for the names that Transformer Engine's layers have."""
    import transformers
    sys.meta_path.insert(0, Stubs())
    package, name = bridge
    mapping = importlib.import_module("megatron.bridge.models.conversion.param_mapping")
    registry = getattr(importlib.import_module("megatron.bridge.models." + package), name)().mapping_registry()
    made = getattr(transformers, model + "ForCausalLM")(getattr(transformers, model + "Config")(**config)).bfloat16()
    made.load_state_dict(distinct(made.state_dict()))
    with tempfile.TemporaryDirectory() as tmp:
        made.save_pretrained(tmp)
        hf = load_file(os.path.join(tmp, "model.safetensors"))
    sizes = type("Sizes", (), {"num_attention_heads": config["num_attention_heads"], "kv_channels": config["head_dim"],
                               "num_query_groups": config["num_key_value_heads"], "hidden_size": config["hidden_size"]})
    state, used = {}, set()
    for m in registry.mappings:
        names = m.hf_param if isinstance(m.hf_param, dict) else {"weight": m.hf_param}
        first = re.compile(re.escape(next(iter(names.values()))).replace(r"\*", r"(\d+)"))
        for values in [found.groups() for found in map(first.fullmatch, sorted(hf)) if found]:
            def fill(pattern):
                parts = pattern.split("*")
                return "".join(a + b for a, b in zip(parts, [*values, ""]))
            to = fill(m.megatron_param)
            if "local_experts" in to or ".input_layernorm" in to or (".pre_mlp_layernorm" in to and "moe" not in package):
                continue
            parts = {k: hf[fill(v)] for k, v in names.items()}
            used.update(fill(v) for v in names.values())
            if isinstance(m, mapping.QKVMapping):
                merge = mapping.merge_qkv_biases if to.endswith("bias") else mapping.merge_qkv_weights
                state[to] = merge(sizes, parts["q"], parts["k"], parts["v"])
            elif isinstance(m, mapping.GatedMLPMapping):
                state[to] = torch.cat([parts["gate"], parts["up"]])
            else:
                state[to] = parts["weight"]
    assert used == set(hf), set(hf) - used
    write(folder, state, hf, {**LLAMA, "model_type": made.config.model_type, **config})


SMALL = {"hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "head_dim": 8,
         "intermediate_size": 24, "vocab_size": 32, "tie_word_embeddings": False}
EXPERTS = {**SMALL, "moe_intermediate_size": 12, "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2}
MLA = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
       "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4, "qk_rope_head_dim": 4, "v_head_dim": 4}
MOE = {"num_experts": 4, "top_k": 2, "moe_hidden_dim": 12, "moe_comm_backend": "standard"}
CASES = {
    "torchtitan-llama3": lambda f: titan_llama3(f, False),
    "torchtitan-llama3-tied": lambda f: titan_llama3(f, True),
    "torchtitan-qwen3": lambda f: titan_qwen3(f, None),
    "torchtitan-qwen3-moe": lambda f: titan_qwen3(f, MOE),
    "litgpt-llama": lambda f: litgpt(f, "llama", "llama"),
    "litgpt-qwen2": lambda f: litgpt(f, "qwen_2_5", "qwen2", attn_bias=True),
    "litgpt-qwen3": lambda f: litgpt(f, "qwen_3", "qwen3", norm_qk=True, head_size=8),
    "litgpt-gemma2": lambda f: litgpt(f, "gemma_2", "gemma2", "Gemma-2", True, mlp_class_name="GemmaMLP", head_size=8,
                                      post_attention_norm=True, post_mlp_norm=True),
    "litgpt-gemma3": lambda f: litgpt(f, "gemma_3", "gemma3_text", "Gemma-3", True, mlp_class_name="GemmaMLP", head_size=8,
                                      post_attention_norm=True, post_mlp_norm=True, norm_qk=True),
    "litgpt-phi3": lambda f: litgpt(f, "phi", "phi3", "Phi-3"),
    "litgpt-pythia": lambda f: litgpt(f, "gpt_neox", "gpt_neox", n_query_groups=4, bias=True, norm_class_name="LayerNorm",
                                      mlp_class_name="GptNeoxMLP"),
    "nanogpt": nanogpt,
    "meta-llama": meta_llama,
    "nanotron-llama": nanotron,
    "nanotron-qwen2": lambda f: nanotron(f, tied=True, bias=True),
    "torchtitan-0.2-llama3": lambda f: titan_02(f, "llama3", "Transformer", {"n_heads": 4, "n_kv_heads": 2}, {}),
    "torchtitan-0.2-qwen3-moe": lambda f: titan_02(f, "qwen3", "Qwen3", {
        "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "hidden_dim": 24, "moe_enabled": True, "moe_inter_dim": 12,
        "num_experts": 4, "num_shared_experts": 0}, {"model_type": "qwen3_moe", "head_dim": 8}),
    "torchtitan-0.2-deepseek-v3": lambda f: titan_02(f, "deepseek_v3", "DeepSeekV3", {
        "n_heads": 4, "inter_dim": 24, "moe_inter_dim": 12, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_nope_head_dim": 4,
        "qk_rope_head_dim": 4, "v_head_dim": 4, "num_experts": 4, "num_shared_experts": 2}, {"model_type": "deepseek_v3"}),
    "torchtitan-0.2-gpt-oss": lambda f: titan_02(f, "gpt_oss", "GptOss", {
        "n_heads": 4, "n_kv_heads": 2, "head_dim": 8, "moe_inter_dim": 12, "num_experts": 4, "num_shared_experts": 0},
        {"model_type": "gpt_oss"}),
    "torchtitan-0.2-llama4": lambda f: titan_02(f, "llama4", "Transformer", {
        "n_heads": 4, "n_kv_heads": 2, "interleave_moe_layer_step": 2, "multiple_of": 8, "num_experts": 4,
        "num_shared_experts": 1}, {"model_type": "llama4_text"}),
    "torchtitan-deepseek-v3": lambda f: titan_deepseek(f, 8),
    "torchtitan-deepseek-v3-lite": lambda f: titan_deepseek(f, 0),
    "torchtitan-gpt-oss": titan_gpt_oss,
    "olmo-core": lambda f: olmo_core(f, qk_norm=True, block_name="reordered_norm", hidden_size_multiple_of=8),
    "olmo-core-flex": lambda f: olmo_core(f, qk_norm=True, reordered_norm=True, num_experts=4, top_k=2, expert_hidden_size=8,
                                          capacity_factor=1.2, lb_loss_weight=0.01, z_loss_weight=0.01),
    "olmo-core-llama": lambda f: olmo_core(f, "llama", hidden_size_multiple_of=8),
    "olmo-core-qwen3": lambda f: olmo_core(f, "qwen3", qk_norm=True, use_head_qk_norm=True, hidden_size_multiple_of=8),
    "olmo": lambda f: olmo(f, "Olmo", "convert_olmo_to_hf_new", layer_norm_type="default", layer_norm_with_affine=False),
    "olmo2": lambda f: olmo(f, "Olmo2", "convert_olmo2_to_hf", layer_norm_type="rms", layer_norm_with_affine=True,
                            attention_layer_norm=True, attention_layer_norm_with_affine=True, norm_after=True),
    "transformers-deepseek-v3": lambda f: fused_experts(f, "DeepseekV3", dict(EXPERTS, **MLA)),
    "transformers-mixtral": lambda f: fused_experts(f, "Mixtral", EXPERTS),
    "transformers-qwen-moe": lambda f: fused_experts(f, "Qwen3Moe", EXPERTS),
    "megatron-llama": lambda f: megatron(f, ("llama.llama_bridge", "LlamaBridge"), "Llama", SMALL),
    "megatron-qwen2": lambda f: megatron(f, ("qwen.qwen2_bridge", "Qwen2Bridge"), "Qwen2", {**SMALL, "head_dim": 4}),
    "megatron-qwen3": lambda f: megatron(f, ("qwen.qwen3_bridge", "Qwen3Bridge"), "Qwen3", SMALL),
    "megatron-qwen-moe": lambda f: megatron(f, ("qwen.qwen3_moe_bridge", "Qwen3MoEBridge"), "Qwen3Moe", EXPERTS),
}

if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        CASES[case](os.path.join(sys.argv[1], case))
        print(case)
