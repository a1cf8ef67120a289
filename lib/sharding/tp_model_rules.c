/*
 * The built-in tensor-parallel plan: rules for the layer names of common decoder models. A pattern matches the end of a
 * module's name, so one rule covers "model.layers.0.self_attn.q_proj" and "layers.0.attention.q_proj".
 * Sources: base_model_tp_plan of the configurations in Hugging Face transformers, and torchtitan's parallelize_llama.
 *
 * GPT-2's projections are Conv1D modules, whose weight is [in, out]. Only the name can show that, so c_attn, q_attn,
 * c_fc and c_proj are taken for Conv1D. A model that uses these names for nn.Linear, such as nanoGPT, still gets boxes
 * that cover its tensors, but they are sharded along the other dimension. A plan file can correct that.
 */
#include "sharding/tp_plan.h"

const fc_tp_rule fc_tp_auto_rules[] = {
    /* Llama, Qwen, Mistral, Mixtral, Gemma, DeepSeek, Phi in transformers */
    {"q_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"k_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"v_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"qkv_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"o_proj", FC_TP_ROWWISE, FC_TP_LINEAR},
    {"gate_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"up_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"gate_up_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"down_proj", FC_TP_ROWWISE, FC_TP_LINEAR},
    {"q_b_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    {"kv_b_proj", FC_TP_COLWISE, FC_TP_LINEAR},
    /* Llama as Meta and torchtitan name it; w1, w2, w3 are also Mixtral's experts */
    {"wq", FC_TP_COLWISE, FC_TP_LINEAR},
    {"wk", FC_TP_COLWISE, FC_TP_LINEAR},
    {"wv", FC_TP_COLWISE, FC_TP_LINEAR},
    {"wqkv", FC_TP_COLWISE, FC_TP_LINEAR},
    {"wo", FC_TP_ROWWISE, FC_TP_LINEAR},
    {"w1", FC_TP_COLWISE, FC_TP_LINEAR},
    {"w3", FC_TP_COLWISE, FC_TP_LINEAR},
    {"w2", FC_TP_ROWWISE, FC_TP_LINEAR},
    /* GPT-2 */
    {"c_attn", FC_TP_COLWISE, FC_TP_CONV1D},
    {"q_attn", FC_TP_COLWISE, FC_TP_CONV1D},
    {"c_fc", FC_TP_COLWISE, FC_TP_CONV1D},
    {"c_proj", FC_TP_ROWWISE, FC_TP_CONV1D},
    /* GPT-NeoX, Bloom, Falcon */
    {"query_key_value", FC_TP_COLWISE, FC_TP_LINEAR},
    {"attention.dense", FC_TP_ROWWISE, FC_TP_LINEAR},
    {"self_attention.dense", FC_TP_ROWWISE, FC_TP_LINEAR},
    {"dense_h_to_4h", FC_TP_COLWISE, FC_TP_LINEAR},
    {"dense_4h_to_h", FC_TP_ROWWISE, FC_TP_LINEAR},
    /* OPT, Whisper, BART */
    {"self_attn.out_proj", FC_TP_ROWWISE, FC_TP_LINEAR},
    {"encoder_attn.out_proj", FC_TP_ROWWISE, FC_TP_LINEAR},
    {"layers.*.fc1", FC_TP_COLWISE, FC_TP_LINEAR},
    {"layers.*.fc2", FC_TP_ROWWISE, FC_TP_LINEAR},
    /* the vocabulary, at both ends */
    {"embed_tokens", FC_TP_ROWWISE, FC_TP_EMBEDDING},
    {"tok_embeddings", FC_TP_ROWWISE, FC_TP_EMBEDDING},
    {"wte", FC_TP_ROWWISE, FC_TP_EMBEDDING},
    {"embed_in", FC_TP_ROWWISE, FC_TP_EMBEDDING},
    {"word_embeddings", FC_TP_ROWWISE, FC_TP_EMBEDDING},
    {"lm_head", FC_TP_COLWISE, FC_TP_LINEAR},
    {"output", FC_TP_COLWISE, FC_TP_LINEAR},
    {"embed_out", FC_TP_COLWISE, FC_TP_LINEAR},
    /* norms */
    {"*norm*", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"*Norm*", FC_TP_REPLICATE, FC_TP_LINEAR},
    {"ln_*", FC_TP_REPLICATE, FC_TP_LINEAR},
};

const size_t fc_tp_auto_count = sizeof fc_tp_auto_rules / sizeof *fc_tp_auto_rules;
