//! A launch command's words, as far as they decide the geometry. What is not looked at is listed, so that it can be
//! noted.

use std::collections::BTreeMap;

use super::{ConvertError, Framework};
use crate::element::{Element, UnknownElement};

/// What a flag is followed by.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    Value,
    Nothing,
}

/// A flag, under all its names; the first is the one it is kept by.
type Flag = (&'static [&'static str], Takes);

/// vLLM's flags: docs.vllm.ai, engine arguments.
const VLLM: &[Flag] = &[
    (&["--model"], Takes::Value),
    (&["--revision"], Takes::Value),
    (&["--dtype"], Takes::Value),
    (&["--kv-cache-dtype"], Takes::Value),
    (&["--block-size"], Takes::Value),
    (&["--tensor-parallel-size", "-tp"], Takes::Value),
    (&["--pipeline-parallel-size", "-pp"], Takes::Value),
    (&["--data-parallel-size", "-dp"], Takes::Value),
    (&["--decode-context-parallel-size", "-dcp"], Takes::Value),
    (
        &["--cp-kv-cache-interleave-size", "--dcp-kv-cache-interleave-size"],
        Takes::Value,
    ),
    (&["--prefill-context-parallel-size", "-pcp"], Takes::Value),
    (&["--num-gpu-blocks-override"], Takes::Value),
    (&["--mamba-cache-dtype"], Takes::Value),
    (&["--mamba-ssm-cache-dtype"], Takes::Value),
    (&["--speculative-config", "-sc"], Takes::Value),
    (&["--hf-overrides"], Takes::Value),
    (&["--hf-config-path"], Takes::Value),
    (&["--attention-backend"], Takes::Value),
    (&["--kv-transfer-config"], Takes::Value),
    (&["--disable-hybrid-kv-cache-manager"], Takes::Nothing),
    (&["--no-disable-hybrid-kv-cache-manager"], Takes::Nothing),
    (&["--disable-sliding-window"], Takes::Nothing),
];

/// SGLang's flags: docs.sglang.io, server arguments.
const SGLANG: &[Flag] = &[
    (&["--model-path", "--model"], Takes::Value),
    (&["--revision"], Takes::Value),
    (&["--dtype"], Takes::Value),
    (&["--kv-cache-dtype"], Takes::Value),
    (&["--page-size"], Takes::Value),
    (&["--tp-size", "--tp", "--tensor-parallel-size"], Takes::Value),
    (&["--pp-size", "--pp", "--pipeline-parallel-size"], Takes::Value),
    (&["--dp-size", "--dp", "--data-parallel-size"], Takes::Value),
    (&["--dcp-size", "--decode-context-parallel-size"], Takes::Value),
    (
        &["--attn-cp-size", "--attention-context-parallel-size"],
        Takes::Value,
    ),
    (&["--mamba-ssm-dtype"], Takes::Value),
    (&["--speculative-algorithm", "--speculative-algo"], Takes::Value),
    (
        &["--speculative-draft-model-path", "--speculative-draft-model"],
        Takes::Value,
    ),
    (&["--json-model-override-args"], Takes::Value),
    (&["--attention-backend"], Takes::Value),
    (&["--prefill-attention-backend"], Takes::Value),
    (&["--decode-attention-backend"], Takes::Value),
    (&["--disaggregation-mode"], Takes::Value),
    (&["--enable-dp-attention"], Takes::Nothing),
    (&["--disable-hybrid-swa-memory"], Takes::Nothing),
];

/// Variables of vLLM that are looked at.
const VLLM_VARIABLES: &[&str] = &[
    "VLLM_ATTENTION_BACKEND",
    "VLLM_KV_CACHE_LAYOUT",
    "VLLM_MLA_DISABLE",
    "VLLM_PP_LAYER_PARTITION",
];

/// Variables of SGLang that are looked at.
const SGLANG_VARIABLES: &[&str] = &[
    "SGLANG_MAMBA_CONV_DTYPE",
    "SGLANG_MAMBA_SSM_DTYPE",
    "SGLANG_PP_LAYER_PARTITION",
];

/// What was given.
pub(super) struct Given {
    values: BTreeMap<&'static str, String>,
    switches: Vec<&'static str>,
    variables: BTreeMap<String, String>,
    /// The model, where it stands without a flag.
    pub(super) positional_model: Option<String>,
    /// Flags and variables that were not looked at.
    pub(super) ignored: Vec<String>,
}

impl Given {
    pub(super) fn parse(framework: Framework, words: &[String]) -> Result<Given, ConvertError> {
        let (flags, variables) = match framework {
            Framework::Vllm => (VLLM, VLLM_VARIABLES),
            Framework::Sglang => (SGLANG, SGLANG_VARIABLES),
        };
        let mut given = Given {
            values: BTreeMap::new(),
            switches: Vec::new(),
            variables: BTreeMap::new(),
            positional_model: None,
            ignored: Vec::new(),
        };
        let mut words = words.iter().peekable();
        let mut after_serve = false;
        while let Some(word) = words.next() {
            if !word.starts_with('-') {
                match word.split_once('=') {
                    Some((name, value)) if is_variable(name) => {
                        if variables.contains(&name) {
                            given.variables.insert(name.to_owned(), value.to_owned());
                        } else {
                            given.ignored.push(name.to_owned());
                        }
                    }
                    _ if after_serve => given.positional_model = Some(word.clone()),
                    _ => {}
                }
                after_serve = word == "serve";
                continue;
            }
            after_serve = false;
            let (name, inline) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word.as_str(), None),
            };
            let written = match name.starts_with("--") {
                true => name.replace('_', "-"),
                false => name.to_owned(),
            };
            let Some((names, takes)) = flags.iter().find(|(names, _)| names.contains(&written.as_str()))
            else {
                if let Some(meant) = meant(&written, flags) {
                    return Err(argument(
                        name,
                        format!("is not known here; {meant} decides the geometry: was it meant?"),
                    ));
                }
                // Of a flag that is not known, it is not known whether a value follows either.
                if inline.is_none() {
                    words.next_if(|next| !next.starts_with('-'));
                }
                // `python -m MODULE` says what is launched, not how.
                if name != "-m" {
                    given.ignored.push(name.to_owned());
                }
                continue;
            };
            match takes {
                Takes::Nothing => given.switches.push(names[0]),
                Takes::Value => {
                    let value = inline.or_else(|| words.next_if(|next| !next.starts_with("--")).cloned());
                    let value = value.ok_or_else(|| argument(name, "a value has to follow"))?;
                    given.values.insert(names[0], value);
                }
            }
        }
        Ok(given)
    }

    pub(super) fn value(&self, flag: &str) -> Option<&str> {
        self.values.get(flag).map(String::as_str)
    }

    pub(super) fn switch(&self, flag: &str) -> bool {
        self.switches.contains(&flag)
    }

    pub(super) fn variable(&self, name: &str) -> Option<&str> {
        self.variables.get(name).map(String::as_str)
    }

    /// A number of at least 1.
    pub(super) fn number(&self, flag: &'static str) -> Result<Option<u32>, ConvertError> {
        let Some(value) = self.value(flag) else {
            return Ok(None);
        };
        match value.parse::<u32>() {
            Ok(number) if number > 0 => Ok(Some(number)),
            _ => Err(argument(flag, format!("{value:?} is no number of at least 1"))),
        }
    }

    pub(super) fn size(&self, flag: &'static str) -> Result<u32, ConvertError> {
        Ok(self.number(flag)?.unwrap_or(1))
    }

    /// An element type; `auto` and absence are `None`.
    pub(super) fn element(&self, flag: &'static str) -> Result<Option<Element>, ConvertError> {
        element(flag, self.value(flag))
    }

    /// The same of a variable.
    pub(super) fn variable_element(&self, name: &'static str) -> Result<Option<Element>, ConvertError> {
        element(name, self.variable(name))
    }

    /// Layers of each stage, from a variable such as `16,16`.
    pub(super) fn partition(
        &self,
        name: &'static str,
        stages: u32,
    ) -> Result<Option<Vec<u32>>, ConvertError> {
        let Some(value) = self.variable(name) else {
            return Ok(None);
        };
        let counts: Option<Vec<u32>> = value.split(',').map(|count| count.trim().parse().ok()).collect();
        match counts {
            Some(counts) if counts.len() == stages as usize => Ok(Some(counts)),
            _ => Err(argument(
                name,
                format!("{value:?} is no list of {stages} numbers of layers"),
            )),
        }
    }
}

fn element(name: &'static str, value: Option<&str>) -> Result<Option<Element>, ConvertError> {
    match value {
        None | Some("auto") => Ok(None),
        Some(value) => {
            let element: Result<Element, UnknownElement> = value.parse();
            element
                .map(Some)
                .map_err(|error| argument(name, error.to_string()))
        }
    }
}

/// Flags that decide how pages, heads, layers and tokens are split: left out by a slip, the envelope is another one.
const SPLITTING: &[&str] = &[
    "--attn-cp-size",
    "--attention-context-parallel-size",
    "--block-size",
    "--cp-kv-cache-interleave-size",
    "--dcp-kv-cache-interleave-size",
    "--dcp-size",
    "--decode-context-parallel-size",
    "--kv-cache-dtype",
    "--page-size",
    "--pipeline-parallel-size",
    "--pp-size",
    "--prefill-context-parallel-size",
    "--tensor-parallel-size",
    "--tp-size",
];

/// The flag of these that an unknown one is a shortening or a misspelling of.
fn meant(unknown: &str, flags: &[Flag]) -> Option<&'static str> {
    let mut names = flags.iter().flat_map(|(names, _)| names.iter().copied());
    names.find(|known| {
        // The first letter tells short ones apart: --ep-size is no slip for --tp-size.
        let begins = unknown.len() >= 6 && known.as_bytes().get(2) == unknown.as_bytes().get(2);
        SPLITTING.contains(known) && begins && (known.starts_with(unknown) || edits(unknown, known) <= 2)
    })
}

/// Edits between two names (Levenshtein); lengths that differ much are far apart without counting.
fn edits(a: &str, b: &str) -> usize {
    if a.len().abs_diff(b.len()) > 2 {
        return a.len().abs_diff(b.len());
    }
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, from) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, to) in b.bytes().enumerate() {
            let replaced = diagonal + usize::from(from != to);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

fn is_variable(name: &str) -> bool {
    let named = |byte: u8| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_';
    name.starts_with(|first: char| first.is_ascii_uppercase()) && name.bytes().all(named)
}

pub(super) fn argument(flag: &str, why: impl Into<String>) -> ConvertError {
    ConvertError::Argument {
        flag: flag.to_owned(),
        why: why.into(),
    }
}
