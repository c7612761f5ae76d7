//! The engine as it was launched: its parallel sizes, pages, and where its memory lies.

use super::arguments::{Given, argument};
use super::config::Config;
use super::{ConvertError, ConvertOptions, Converted, Framework, Notes, attention};
use crate::element::Element;
use crate::envelope::{Dcp, Kind, Role, Scales};
use crate::launch::{Allocation, Launch, Order, Stages};
use crate::shape::ModelShape;

/// Pages of a pool when nobody says; it is not compared.
const POOL_PAGES: u32 = 1024;

pub(super) struct Engine<'a> {
    pub(super) config: &'a Config,
    pub(super) framework: Framework,
    pub(super) given: &'a Given,
    options: &'a ConvertOptions,
    pub(super) notes: Notes,
}

impl<'a> Engine<'a> {
    pub(super) fn new(
        config: &'a Config,
        framework: Framework,
        given: &'a Given,
        options: &'a ConvertOptions,
    ) -> Engine<'a> {
        Engine {
            config,
            framework,
            given,
            options,
            notes: Notes::default(),
        }
    }

    pub(super) fn convert(mut self) -> Result<Converted, ConvertError> {
        self.refuse_overrides()?;
        attention::refuse_unknown_features(self.config)?;
        if let Some(name) = &self.options.model_type {
            self.notes.add(
                "model_type",
                format!(
                    "read as {name}, as --model-type says; keys that {name} does not have were not looked at"
                ),
            );
        }
        let layers = self.config.layers()?;
        let element = self.element()?;
        let mut cached = self.cached(layers, element)?;
        cached.extend(self.draft(layers, &cached)?);
        for one in cached
            .iter_mut()
            .filter(|one| one.element.is_none() && element.bits() == 8)
        {
            // Both frameworks scale by constants that they load with the weights, or by 1.
            one.scales = Scales::Model;
        }
        let (cached, shared_pool) = self.group(cached);
        let mut model = ModelShape::new(&self.model()?, layers);
        model.cached = cached;

        let launch = self.launch(layers, element, shared_pool, &model)?;
        let arrangement = launch.arrangement(&model)?;
        let mut envelope = launch.envelope(&model)?;
        envelope.identity.revision = self.given.value("--revision").map(str::to_owned);
        envelope.identity.config_digest = Some(self.config.digest());
        if self.options.framework_version.is_none() {
            self.notes.add("framework_version", "not known");
        }
        if !self.given.ignored.is_empty() {
            let flags = self.given.ignored.join(" ");
            self.notes.add("arguments", format!("not looked at: {flags}"));
        }
        Ok(Converted {
            envelope,
            arrangement,
            notes: self.notes.0,
        })
    }

    fn refuse_overrides(&self) -> Result<(), ConvertError> {
        for flag in ["--hf-overrides", "--hf-config-path", "--json-model-override-args"] {
            if self.given.value(flag).is_some() {
                return Err(argument(
                    flag,
                    "changes the configuration; apply it to config.json, then leave it out",
                ));
            }
        }
        if self
            .given
            .variable("VLLM_MLA_DISABLE")
            .is_some_and(|value| value != "0")
        {
            return Err(argument(
                "VLLM_MLA_DISABLE",
                "keys and values in place of a latent are not known here",
            ));
        }
        Ok(())
    }

    fn model(&self) -> Result<String, ConvertError> {
        let flag = match self.framework {
            Framework::Vllm => "--model",
            Framework::Sglang => "--model-path",
        };
        let named = self
            .given
            .value(flag)
            .map(str::to_owned)
            .or_else(|| self.given.positional_model.clone());
        match named {
            Some(name) => Ok(name),
            None => {
                let named = self.config.text("_name_or_path")?.filter(|name| !name.is_empty());
                named.ok_or_else(|| argument(flag, "the model is not named"))
            }
        }
    }

    fn launch(
        &mut self,
        layers: u32,
        element: Element,
        shared_pool: bool,
        model: &ModelShape,
    ) -> Result<Launch, ConvertError> {
        let role = self.role()?;
        let (tp, cp) = self.parallel()?;
        let pool_pages = match (
            self.options.pool_pages,
            self.given.number("--num-gpu-blocks-override")?,
        ) {
            (Some(pages), _) | (None, Some(pages)) => pages,
            (None, None) => {
                self.notes.add(
                    "page_group.pool_pages",
                    format!("not known; {POOL_PAGES} stands in, and is not compared"),
                );
                POOL_PAGES
            }
        };
        let (order, allocation) = self.placement(shared_pool)?;
        Ok(Launch {
            engine: self.options.engine.clone().unwrap_or_else(|| role.to_string()),
            role,
            framework: match self.framework {
                Framework::Vllm => "vllm",
                Framework::Sglang => "sglang",
            }
            .to_owned(),
            framework_version: self.options.framework_version.clone().unwrap_or_default(),
            tp,
            pp: Stages::Layers(self.stages(layers)?),
            dcp: self.dcp(tp, model)?,
            prefill_cp: cp,
            page_size: self.page_size(model)?,
            pool_pages,
            slots: pool_pages,
            element,
            order,
            allocation,
            shared_pool,
            ..Launch::default()
        })
    }

    fn role(&mut self) -> Result<Role, ConvertError> {
        if let Some(role) = self.options.role {
            return Ok(role);
        }
        let stated = match self.framework {
            Framework::Vllm => match self.given.value("--kv-transfer-config") {
                None => None,
                Some(text) => {
                    let config: Option<serde_json::Value> = serde_json::from_str(text).ok();
                    let config = config.ok_or_else(|| argument("--kv-transfer-config", "is no JSON"))?;
                    config
                        .get("kv_role")
                        .and_then(|role| role.as_str())
                        .map(str::to_owned)
                }
            },
            Framework::Sglang => self.given.value("--disaggregation-mode").map(str::to_owned),
        };
        Ok(match stated.as_deref() {
            Some("kv_producer" | "prefill") => Role::Prefill,
            Some("kv_consumer" | "decode") => Role::Decode,
            Some(_) | None => Role::Both,
        })
    }

    /// TP and prefill context-parallel sizes of one engine; data-parallel replicas are engines of their own.
    fn parallel(&mut self) -> Result<(u32, u32), ConvertError> {
        match self.framework {
            Framework::Vllm => {
                if self.given.size("--data-parallel-size")? > 1 {
                    self.notes.add(
                        "engine",
                        "each data-parallel replica is an engine of its own, with this geometry",
                    );
                }
                Ok((
                    self.given.size("--tensor-parallel-size")?,
                    self.given.size("--prefill-context-parallel-size")?,
                ))
            }
            Framework::Sglang => {
                let (tp, dp) = (self.given.size("--tp-size")?, self.given.size("--dp-size")?);
                let cp = self.given.size("--attn-cp-size")?;
                let within = if self.given.switch("--enable-dp-attention") {
                    dp
                } else {
                    1
                };
                if dp > 1 {
                    self.notes.add(
                        "engine",
                        match within {
                            1 => "each data-parallel replica is an engine of its own, with this geometry".to_owned(),
                            _ => format!("data-parallel attention: each of {dp} replicas is an engine of its own, with this geometry"),
                        },
                    );
                }
                let shares = u64::from(within) * u64::from(cp);
                if u64::from(tp) % shares != 0 {
                    let why = format!(
                        "{tp} cannot be split over {within} data-parallel times {cp} context-parallel ranks"
                    );
                    return Err(argument("--tp-size", why));
                }
                Ok((u32::try_from(u64::from(tp) / shares).unwrap_or(1), cp))
            }
        }
    }

    /// Layers of each pipeline stage, as the framework splits them.
    fn stages(&self, layers: u32) -> Result<Vec<u32>, ConvertError> {
        let (flag, variable) = match self.framework {
            Framework::Vllm => ("--pipeline-parallel-size", "VLLM_PP_LAYER_PARTITION"),
            Framework::Sglang => ("--pp-size", "SGLANG_PP_LAYER_PARTITION"),
        };
        let stages = self.given.size(flag)?;
        if let Some(counts) = self.given.partition(variable, stages)? {
            return Ok(counts);
        }
        if stages > layers {
            return Err(argument(
                flag,
                format!("{stages} stages cannot share {layers} layers"),
            ));
        }
        let (each, rest) = (layers / stages, layers % stages);
        Ok((0..stages)
            .map(|stage| {
                let more = match self.framework {
                    // From the last but one stage backwards (vllm/distributed/utils.py, get_pp_indices).
                    Framework::Vllm => stage + 1 < stages && stages - 1 - stage <= rest,
                    // The last stages (sglang/srt/distributed/utils.py, get_pp_indices).
                    Framework::Sglang => stages - stage <= rest,
                };
                each + u32::from(more)
            })
            .collect())
    }

    fn dcp(&self, tp: u32, model: &ModelShape) -> Result<Dcp, ConvertError> {
        Ok(match self.framework {
            Framework::Vllm => {
                let flag = "--decode-context-parallel-size";
                let size = self.given.size(flag)?;
                if size > 1 {
                    refuse_dcp_of_heads(flag, size, tp, model)?;
                }
                let interleave = self.given.size("--cp-kv-cache-interleave-size")?;
                Dcp { size, interleave }
            }
            Framework::Sglang => Dcp {
                size: self.given.size("--dcp-size")?,
                interleave: 1,
            },
        })
    }

    fn page_size(&mut self, model: &ModelShape) -> Result<u32, ConvertError> {
        let (flag, usual) = match self.framework {
            Framework::Vllm => ("--block-size", 16),
            Framework::Sglang => ("--page-size", 1),
        };
        if let Some(size) = self.given.number(flag)? {
            return Ok(size);
        }
        let latent = model.cached.iter().any(|one| one.kind == Kind::Latent);
        let sparse = model.cached.iter().any(|one| one.kind == Kind::Indexer);
        let size = match self.framework {
            Framework::Vllm if latent => 64,
            Framework::Sglang if sparse => 64,
            _ => usual,
        };
        self.notes.add(
            "page_group.page_size",
            format!("{flag} is not given; {size} is assumed, but attention backends insist on their own: see the log"),
        );
        Ok(size)
    }

    fn placement(&mut self, shared_pool: bool) -> Result<(Order, Allocation), ConvertError> {
        let variable = "VLLM_KV_CACHE_LAYOUT";
        let order = match self.given.variable(variable) {
            Some("NHD") => Order::Nhd,
            Some("HND") => Order::Hnd,
            Some(other) => return Err(argument(variable, format!("{other:?} is neither NHD nor HND"))),
            None => {
                self.notes.add(
                    "arrangement.order",
                    "assumed NHD; some attention backends use HND",
                );
                Order::Nhd
            }
        };
        let backend = self
            .given
            .value("--attention-backend")
            .or(self.given.variable("VLLM_ATTENTION_BACKEND"));
        let flashinfer = backend.is_some_and(|name| name.eq_ignore_ascii_case("flashinfer"));
        let allocation = match self.framework {
            Framework::Vllm if shared_pool || flashinfer => Allocation::LayerPages,
            Framework::Vllm => Allocation::Layer,
            Framework::Sglang => Allocation::LayerPart,
        };
        self.notes.add(
            "arrangement.allocation",
            "assumed: where pages, parts and layers lie; it is not compared, and `kvferry plan` shows it",
        );
        Ok((order, allocation))
    }
}

/// vLLM splits keys and values by tokens only over ranks that would otherwise hold the same heads, and does not start
/// otherwise; MLA latents have one head that all ranks hold (vllm/config/model.py, verify_with_parallel_config).
fn refuse_dcp_of_heads(flag: &str, size: u32, tp: u32, model: &ModelShape) -> Result<(), ConvertError> {
    if model.cached.iter().any(|one| one.kind == Kind::Latent) {
        return Ok(());
    }
    let of_heads = model
        .cached
        .iter()
        .filter(|one| matches!(one.kind, Kind::Kv | Kind::Window));
    let heads = of_heads.flat_map(|one| &one.parts).map(|part| part.heads).max();
    let Some(heads) = heads.filter(|heads| *heads > 0) else {
        return Ok(());
    };
    let most = tp / heads;
    if tp > heads && size <= most {
        return Ok(());
    }
    let needed = u64::from(heads) * u64::from(size);
    Err(argument(
        flag,
        format!(
            "vLLM does not start with {size}: except for MLA it wants --tensor-parallel-size above the number of KV heads, \
             and a DCP size of at most their ratio; here TP is {tp} and there are {heads} KV heads. Leave it out, or \
             set --tensor-parallel-size to {needed} or more"
        ),
    ))
}
