//! The FP8 and FP4 formats of inference engines, as data: granularity and names of scales, and the content of `config.json`.
//!
//! In FP8 formats, the weight of a linear keeps its name and its shape `[outputs, inputs]` and becomes E4M3. The scale is a separate F32 tensor, and
//! is multiplied with the codes. `fp4.rs` has the tensors of FP4 formats. Sources: the loaders of vLLM, transformers, compressed-tensors and ModelOpt.

use ottava_models::{Fp4Pack, MODELOPT_FILE, WeightScales};
use ottava_tensor::Granularity;
use serde::Serialize;
use serde_json::{Value, json};

/// The convention of names and settings, with the engines that read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Convention {
    /// `fp8`, the format of DeepSeek-V3: vLLM, SGLang, TensorRT-LLM and transformers.
    #[serde(rename = "fp8-block")]
    DeepSeek,
    /// `compressed-tensors`: vLLM, SGLang and transformers.
    CompressedTensors,
    /// `modelopt`: TensorRT-LLM, vLLM and SGLang.
    #[serde(rename = "modelopt")]
    ModelOpt,
}

/// The granularity of scales.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Scheme {
    /// One scale per output of a weight. Engines compute one scale per token of an input.
    Dynamic,
    /// One scale per weight, and one stored scale per input.
    Static,
    /// One scale per 128x128 block of a weight, from the run or a power of two. Engines compute one scale per 128 channels of a token.
    Block,
    /// Four bits: one E4M3 scale per 16 inputs and one scale per weight. Only in compressed-tensors. Engines do not cast inputs.
    Nvfp4,
    /// Four bits: one E8M0 scale per 32 inputs. Only in compressed-tensors. Engines do not cast inputs.
    Mxfp4,
}

/// A format of FP8 or FP4 weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Fp8Format {
    /// The convention of names and settings.
    pub layout: Convention,
    /// The granularity of scales.
    pub scheme: Scheme,
}

impl Fp8Format {
    /// DeepSeek's format, with scales of blocks.
    pub const FP8_BLOCK: Fp8Format = Fp8Format { layout: Convention::DeepSeek, scheme: Scheme::Block };

    /// Returns which elements of a weight share a scale.
    pub fn scales(self) -> WeightScales {
        match self.scheme {
            Scheme::Dynamic => WeightScales::Rows,
            Scheme::Static => WeightScales::Tensor,
            Scheme::Block => WeightScales::Blocks([128, 128]),
            Scheme::Nvfp4 => WeightScales::Blocks([1, Fp4Pack::Nvfp4.block()]),
            Scheme::Mxfp4 => WeightScales::Blocks([1, Fp4Pack::Mxfp4.block()]),
        }
    }

    /// Returns the granularity of the casts of training whose codes the format keeps. Returns `None` if no recipe has such casts.
    pub fn granularity(self) -> Option<Granularity> {
        match self.scheme {
            Scheme::Dynamic => Some(Granularity::PerRow),
            Scheme::Static => Some(Granularity::PerTensor),
            Scheme::Block => Some(Granularity::Blocks128x128),
            Scheme::Nvfp4 => Some(Granularity::Nvfp4Squares),
            Scheme::Mxfp4 => None,
        }
    }

    /// Returns the format of compressed-tensors, if weights are in four bits.
    pub fn fp4(self) -> Option<Fp4Pack> {
        match self.scheme {
            Scheme::Nvfp4 => Some(Fp4Pack::Nvfp4),
            Scheme::Mxfp4 => Some(Fp4Pack::Mxfp4),
            Scheme::Dynamic | Scheme::Static | Scheme::Block => None,
        }
    }

    /// Returns a number that must divide the outputs and the inputs of a weight. It must also divide the share of each tensor parallel rank. 128x128
    /// blocks must be whole: transformers rejects incomplete blocks, and vLLM rejects shares of a block. FP8 products of Hopper GPUs need 16.
    pub fn multiple(self) -> usize {
        match self.scheme {
            Scheme::Dynamic | Scheme::Static | Scheme::Nvfp4 => 16,
            Scheme::Mxfp4 => 32,
            Scheme::Block => 128,
        }
    }

    /// Returns the name of the scale of a linear's weight.
    pub fn scale_name(self, linear: &str) -> String {
        match self.layout {
            // Despite the name, it is the multiplier, like in the other formats.
            Convention::DeepSeek => format!("{linear}.weight_scale_inv"),
            Convention::CompressedTensors | Convention::ModelOpt => format!("{linear}.weight_scale"),
        }
    }

    /// Returns the shape of the scale of a weight.
    pub fn scale_shape(self, weight: [usize; 2]) -> Vec<usize> {
        let grid = self.scales().grid(weight);
        match (self.layout, self.scheme) {
            (Convention::ModelOpt, Scheme::Static) => vec![],
            (Convention::ModelOpt, Scheme::Dynamic) => vec![grid[0]],
            (Convention::ModelOpt, Scheme::Block) => vec![grid[0], 1, grid[1], 1],
            (_, Scheme::Static) => vec![1],
            (_, Scheme::Dynamic | Scheme::Block | Scheme::Nvfp4 | Scheme::Mxfp4) => grid.to_vec(),
        }
    }

    /// Returns the name and the shape of the scale of a linear's input, if the format stores one.
    pub fn input_scale(self, linear: &str) -> Option<(String, Vec<usize>)> {
        let shape = match self.layout {
            Convention::ModelOpt => vec![],
            Convention::DeepSeek | Convention::CompressedTensors => vec![1],
        };
        (self.scheme == Scheme::Static).then(|| (format!("{linear}.input_scale"), shape))
    }

    /// Returns `quantization_config` of `config.json`. `left` must list all linears that stay in BF16, because readers quantize every other linear.
    /// If the list is not empty, it must also have the head.
    pub fn config(self, left: &[String]) -> Value {
        match self.layout {
            Convention::DeepSeek => json!({
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": left,
            }),
            Convention::CompressedTensors => {
                let number = |fields: Value| {
                    let bits = if self.fp4().is_some() { 4 } else { 8 };
                    let mut number = json!({"num_bits": bits, "type": "float", "symmetric": true});
                    let fields = fields.as_object().expect("fields are an object").clone();
                    number.as_object_mut().expect("it is an object").extend(fields);
                    number
                };
                let (weights, inputs) = match self.scheme {
                    Scheme::Dynamic => (
                        json!({"dynamic": false, "strategy": "channel"}),
                        json!({"dynamic": true, "strategy": "token"}),
                    ),
                    Scheme::Static => (
                        json!({"dynamic": false, "strategy": "tensor"}),
                        json!({"dynamic": false, "strategy": "tensor"}),
                    ),
                    Scheme::Block => (
                        json!({"dynamic": false, "strategy": "block", "block_structure": [128, 128]}),
                        json!({"dynamic": true, "strategy": "group", "group_size": 128}),
                    ),
                    Scheme::Nvfp4 | Scheme::Mxfp4 => {
                        let format = self.fp4().expect("weights are in four bits");
                        let (strategy, block) = (format.strategy(), format.block());
                        (json!({"dynamic": false, "strategy": strategy, "group_size": block}), Value::Null)
                    }
                };
                let group = json!({
                    "targets": ["Linear"],
                    "weights": number(weights),
                    "input_activations": if inputs.is_null() { inputs } else { number(inputs) },
                    "output_activations": null,
                });
                json!({
                    "quant_method": "compressed-tensors",
                    "format": self.fp4().map_or("float-quantized", Fp4Pack::name),
                    "quantization_status": "compressed",
                    "ignore": left,
                    "kv_cache_scheme": null,
                    "config_groups": {"group_0": group},
                })
            }
            Convention::ModelOpt => json!({
                "quant_method": "modelopt",
                "quant_algo": self.algorithm(),
                "ignore": left,
                "producer": producer(),
            }),
        }
    }

    /// Returns the other files of the folder, by name.
    pub fn files(self, left: &[String]) -> Vec<(&'static str, Value)> {
        match self.layout {
            Convention::DeepSeek | Convention::CompressedTensors => vec![],
            Convention::ModelOpt => {
                let quantization = json!({
                    "quant_algo": self.algorithm(),
                    "kv_cache_quant_algo": null,
                    "exclude_modules": left,
                });
                vec![(MODELOPT_FILE, json!({"producer": producer(), "quantization": quantization}))]
            }
        }
    }

    /// Returns ModelOpt's name of the scheme.
    fn algorithm(self) -> &'static str {
        match self.scheme {
            Scheme::Dynamic => "FP8_PER_CHANNEL_PER_TOKEN",
            Scheme::Static => "FP8",
            Scheme::Block => "FP8_PB_WO",
            Scheme::Nvfp4 | Scheme::Mxfp4 => unreachable!("these schemes are formats of compressed-tensors"),
        }
    }
}

/// Returns the producer. Readers recognize ModelOpt's layout by this name, even if another program writes it.
fn producer() -> Value {
    json!({"name": "modelopt", "version": concat!("ottava ", env!("CARGO_PKG_VERSION"))})
}
