/*
 * Names of torch and NumPy that may be values, because they are classes without surprises, constants, or functions that
 * only compute: see harmless.h.
 */
#include "torch/names/globals.h"
#include "torch/names/harmless.h"
#include "torch/names/words.h"

#include <string.h>

/* The classes of torch.nn.modules. */
static const char layers[] =
    "AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d AdaptiveLogSoftmaxWithLoss AdaptiveMaxPool1d "
    "AdaptiveMaxPool2d AdaptiveMaxPool3d AlphaDropout AvgPool1d AvgPool2d AvgPool3d BCELoss BCEWithLogitsLoss "
    "BatchNorm1d BatchNorm2d BatchNorm3d Bilinear CELU CTCLoss ChannelShuffle CircularPad1d CircularPad2d "
    "CircularPad3d ConstantPad1d ConstantPad2d ConstantPad3d Container Conv1d Conv2d Conv3d ConvTranspose1d "
    "ConvTranspose2d ConvTranspose3d CosineEmbeddingLoss CosineSimilarity CrossEntropyLoss CrossMapLRN2d "
    "Dropout Dropout1d Dropout2d Dropout3d ELU Embedding EmbeddingBag FeatureAlphaDropout Flatten Fold "
    "FractionalMaxPool2d FractionalMaxPool3d GELU GLU GRU GRUCell GaussianNLLLoss GroupNorm Hardshrink "
    "Hardsigmoid Hardswish Hardtanh HingeEmbeddingLoss HuberLoss Identity InstanceNorm1d InstanceNorm2d "
    "InstanceNorm3d KLDivLoss L1Loss LPPool1d LPPool2d LPPool3d LSTM LSTMCell LayerNorm LazyBatchNorm1d "
    "LazyBatchNorm2d LazyBatchNorm3d LazyConv1d LazyConv2d LazyConv3d LazyConvTranspose1d LazyConvTranspose2d "
    "LazyConvTranspose3d LazyInstanceNorm1d LazyInstanceNorm2d LazyInstanceNorm3d LazyLinear LeakyReLU Linear "
    "LinearCrossEntropyLoss LocalResponseNorm LogSigmoid LogSoftmax MSELoss MarginRankingLoss MaxPool1d "
    "MaxPool2d MaxPool3d MaxUnpool1d MaxUnpool2d MaxUnpool3d Mish Module ModuleDict ModuleList "
    "MultiLabelMarginLoss MultiLabelSoftMarginLoss MultiMarginLoss MultiheadAttention NLLLoss NLLLoss2d "
    "NonDynamicallyQuantizableLinear PReLU PairwiseDistance ParameterDict ParameterList PixelShuffle "
    "PixelUnshuffle PoissonNLLLoss RMSNorm RNN RNNBase RNNCell RNNCellBase RReLU ReLU ReLU6 ReflectionPad1d "
    "ReflectionPad2d ReflectionPad3d ReplicationPad1d ReplicationPad2d ReplicationPad3d SELU Sequential SiLU "
    "Sigmoid SmoothL1Loss SoftMarginLoss Softmax Softmax2d Softmin Softplus Softshrink Softsign SyncBatchNorm "
    "Tanh Tanhshrink Threshold Transformer TransformerDecoder TransformerDecoderLayer TransformerEncoder "
    "TransformerEncoderLayer TripletMarginLoss TripletMarginWithDistanceLoss Unflatten Unfold Upsample "
    "UpsamplingBilinear2d UpsamplingNearest2d ZeroPad1d ZeroPad2d ZeroPad3d _AdaptiveAvgPoolNd "
    "_AdaptiveMaxPoolNd _AvgPoolNd _BatchNorm _CircularPadNd _ConstantPadNd _ConvNd _ConvTransposeMixin "
    "_ConvTransposeNd _DropoutNd _InstanceNorm _LPPoolNd _LazyNormBase _Loss _MaxPoolNd _MaxUnpoolNd _NormBase "
    "_ReflectionPadNd _ReplicationPadNd _WeightedLoss";

/* Functions that activate a layer or compute a loss. Configurations name them. */
static const char activations[] =
    "relu relu6 gelu silu mish elu selu celu leaky_relu prelu rrelu glu tanh sigmoid softplus softsign softmax "
    "softmin log_softmax logsigmoid log_sigmoid hardtanh hardswish hardsigmoid hardshrink softshrink tanhshrink "
    "threshold cross_entropy mse_loss l1_loss smooth_l1_loss huber_loss nll_loss kl_div binary_cross_entropy "
    "binary_cross_entropy_with_logits cosine_similarity scaled_dot_product_attention normalize layer_norm "
    "rms_norm dropout linear sin cos exp square";

static const char numpy_types[] =
    "bool_ bool int8 int16 int32 int64 intp longlong uint8 uint16 uint32 uint64 ulonglong float16 float32 "
    "float64 longdouble complex64 complex128 str_ bytes_ datetime64 timedelta64";

/* Members of torch.qscheme and torch.memory_format. */
static const char torch_constants[] =
    "per_tensor_affine per_channel_affine per_tensor_symmetric per_channel_symmetric "
    "per_channel_affine_float_qparams contiguous_format preserve_format channels_last channels_last_3d";

bool fc_harmless_is_layer(const char *module, size_t module_len, const char *name, size_t name_len) {
    static const char prefix[] = "torch.nn.modules.";
    const size_t n = sizeof prefix - 1;
    return module_len > n && memcmp(module, prefix, n) == 0 && !memchr(module + n, '.', module_len - n) &&
           fc_words_have(layers, name, name_len);
}

bool fc_harmless_is_activation(const char *name) {
    return fc_words_have(activations, name, strlen(name));
}

bool fc_harmless_is_reference(const char *module, const char *name) {
    const bool is_class = name[0] >= 'A' && name[0] <= 'Z' && !strchr(name, '.');
    if (strcmp(module, "torch") == 0) {
        return fc_words_have(torch_constants, name, strlen(name));
    }
    if (strcmp(module, "numpy") == 0) {
        return fc_words_have(numpy_types, name, strlen(name));
    }
    if (strcmp(module, "torch.nn.functional") == 0 || strcmp(module, "torch._C._nn") == 0) {
        return fc_harmless_is_activation(name);
    }
    return is_class && (strcmp(module, "typing") == 0 || fc_module_is_within(module, "torch.optim"));
}
