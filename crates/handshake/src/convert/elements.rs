//! Element types: what `auto` and the frameworks' own names stand for.

use super::arguments::argument;
use super::engine::Engine;
use super::{ConvertError, Framework};
use crate::element::{Element, UnknownElement};

impl Engine<'_> {
    /// The model's dtype: what `auto` resolves to. `auto` itself where it cannot be known.
    pub(super) fn model_dtype(&mut self) -> Result<Element, ConvertError> {
        if let Some(element) = self.given.element("--dtype")? {
            return Ok(element);
        }
        let key = if self.config.get("dtype").is_some() {
            "dtype"
        } else {
            "torch_dtype"
        };
        let stated = self.config.text(key)?;
        let element = stated.as_deref().and_then(|name| name.parse().ok());
        Ok(match element {
            Some(element @ (Element::Bf16 | Element::Fp16)) => element,
            _ => {
                let stated = stated.unwrap_or("not stated".to_owned());
                self.notes.add(
                    "component.element",
                    format!("`auto`: the model's dtype is {stated}, and what the framework makes of it is not known; state --dtype"),
                );
                Element::Auto
            }
        })
    }

    /// The KV cache dtype.
    pub(super) fn element(&mut self) -> Result<Element, ConvertError> {
        let flag = "--kv-cache-dtype";
        let name = self.given.value(flag).unwrap_or("auto");
        match name {
            "auto" => {
                let quantised = self
                    .config
                    .get("quantization_config")
                    .is_some_and(|quantisation| {
                        let states = |key| quantisation.get(key).is_some_and(|value| !value.is_null());
                        states("kv_cache_scheme") || states("kv_cache_quant_algo")
                    });
                if quantised {
                    self.notes.add(
                        "component.element",
                        "`auto`: the checkpoint states a KV cache quantisation, which releases follow or not; state \
                         --kv-cache-dtype",
                    );
                    return Ok(Element::Auto);
                }
                let element = self.model_dtype()?;
                if element != Element::Auto {
                    self.notes.add(
                        "component.element",
                        format!("{flag} is auto, which is the model's dtype: {element}"),
                    );
                }
                Ok(element)
            }
            "fp8" if self.framework == Framework::Vllm => {
                self.notes.add(
                    "component.element",
                    "fp8 is fp8_e4m3; on AMD MI300 it is fp8_e4m3fnuz",
                );
                Ok(Element::Fp8E4m3)
            }
            "fp8_ds_mla" if self.config.get("index_head_dim").is_some() => Ok(Element::Fp8E4m3),
            // Names for kinds of fp8 whose scales lie where only their backends know.
            "fp8_ds_mla" | "fp8_inc" => Err(scales_not_known(flag, name)),
            _ => match name.parse() {
                Ok(
                    element @ (Element::Bf16
                    | Element::Fp16
                    | Element::Fp32
                    | Element::Fp8E4m3
                    | Element::Fp8E5m2
                    | Element::Fp8E4m3Fnuz
                    | Element::Fp8E5m2Fnuz),
                ) => Ok(element),
                Ok(_) => Err(scales_not_known(flag, name)),
                Err(error) => {
                    let error: UnknownElement = error;
                    Err(argument(flag, error.to_string()))
                }
            },
        }
    }

    /// Element types of the convolution's inputs and of the recurrent state.
    pub(super) fn state_elements(&mut self) -> Result<(Element, Element), ConvertError> {
        let stated = self.config.element("mamba_ssm_dtype")?;
        let (conv, state) = match self.framework {
            Framework::Vllm => {
                let conv = match self.given.element("--mamba-cache-dtype")? {
                    Some(element) => element,
                    None => self.model_dtype()?,
                };
                (
                    conv,
                    self.given
                        .element("--mamba-ssm-cache-dtype")?
                        .or(stated)
                        .unwrap_or(conv),
                )
            }
            Framework::Sglang => {
                let conv = self.given.variable_element("SGLANG_MAMBA_CONV_DTYPE")?;
                let by_flag = self.given.element("--mamba-ssm-dtype")?;
                let by_variable = self.given.variable_element("SGLANG_MAMBA_SSM_DTYPE")?;
                (
                    conv.unwrap_or(Element::Bf16),
                    by_flag.or(by_variable).or(stated).unwrap_or(Element::Fp32),
                )
            }
        };
        self.notes.add(
            "component.recurrent_state",
            format!(
                "assumed: convolution {conv}, state {state}; the order of elements in a head's state has changed \
                 between releases, so run the same release on both sides"
            ),
        );
        Ok((conv, state))
    }
}

fn scales_not_known(flag: &str, name: &str) -> ConvertError {
    argument(
        flag,
        format!(
            "where the scales of {name} lie is not known here; write the envelope by hand (docs/envelope.md)"
        ),
    )
}
