//! A model's `config.json`: typed reading, with errors that name the key.

use serde_json::{Map, Value};

use super::ConvertError;
use crate::element::Element;
use crate::limits::MAX_LAYERS;

/// Most bytes of a `config.json`.
pub const MAX_CONFIG: usize = 16 << 20;

/// Keys under which models of several modalities keep their language model.
const NESTED: [&str; 3] = ["text_config", "llm_config", "language_config"];

/// Keys that say nothing of what is computed.
const NOT_DIGESTED: [&str; 12] = [
    "_name_or_path",
    "architectures",
    "auto_map",
    "bos_token_id",
    "dtype",
    "eos_token_id",
    "model_type",
    "pad_token_id",
    "quantization_config",
    "torch_dtype",
    "transformers_version",
    "use_cache",
];

pub(super) struct Config {
    root: Map<String, Value>,
    /// The language model's part, where it is nested.
    nested: Option<Map<String, Value>>,
    model_type: String,
}

impl Config {
    pub(super) fn parse(text: &str, model_type: Option<&str>) -> Result<Config, ConvertError> {
        let no_json = |cause: String| ConvertError::NoJson { cause };
        if text.len() > MAX_CONFIG {
            return Err(no_json(format!("{} bytes; {MAX_CONFIG} are allowed", text.len())));
        }
        let value: Value = serde_json::from_str(text).map_err(|error| no_json(error.to_string()))?;
        let Value::Object(root) = value else {
            return Err(no_json("it is no object".to_owned()));
        };
        let nested = NESTED.iter().find_map(|key| root.get(*key)?.as_object().cloned());
        let mut config = Config {
            root,
            nested,
            model_type: String::new(),
        };
        config.model_type = match model_type {
            Some(name) => name.to_owned(),
            None => config.text("model_type")?.ok_or(ConvertError::Missing {
                key: "model_type".to_owned(),
                wanted: "says what the model caches",
            })?,
        };
        Ok(config)
    }

    pub(super) fn model_type(&self) -> &str {
        &self.model_type
    }

    /// The value of a key, in the language model's part first; null is absent.
    pub(super) fn get(&self, key: &str) -> Option<&Value> {
        let nested = self.nested.as_ref().and_then(|nested| nested.get(key));
        nested
            .or_else(|| self.root.get(key))
            .filter(|value| !value.is_null())
    }

    /// Whether a key is there, be it null.
    pub(super) fn states(&self, key: &str) -> bool {
        self.nested
            .iter()
            .chain([&self.root])
            .any(|part| part.contains_key(key))
    }

    /// The first key that begins so, and is not null.
    pub(super) fn key_beginning(&self, with: &[&str]) -> Option<&str> {
        let keys = self
            .nested
            .iter()
            .flatten()
            .chain(&self.root)
            .filter(|(_, value)| !value.is_null());
        let mut keys = keys.map(|(key, _)| key.as_str());
        keys.find(|key| with.iter().any(|begin| key.starts_with(begin)))
    }

    pub(super) fn number(&self, key: &str) -> Result<Option<u32>, ConvertError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
        number
            .map(Some)
            .ok_or_else(|| wrong(key, value, "a whole number"))
    }

    /// A number that has to be there, and is at least 1.
    pub(super) fn count(&self, key: &str, wanted: &'static str) -> Result<u32, ConvertError> {
        let missing = || ConvertError::Missing {
            key: key.to_owned(),
            wanted,
        };
        match self.number(key)?.ok_or_else(missing)? {
            0 => Err(wrong(key, &Value::from(0), "at least 1")),
            count => Ok(count),
        }
    }

    pub(super) fn text(&self, key: &str) -> Result<Option<String>, ConvertError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value
            .as_str()
            .map(|text| Some(text.to_owned()))
            .ok_or_else(|| wrong(key, value, "a string"))
    }

    /// An element type; `auto` and absence are `None`.
    pub(super) fn element(&self, key: &str) -> Result<Option<Element>, ConvertError> {
        match self.text(key)?.as_deref() {
            None | Some("auto") => Ok(None),
            Some(name) => name.parse().map(Some).map_err(|_| {
                wrong(
                    key,
                    &Value::from(name),
                    "an element type, such as bfloat16 or float32",
                )
            }),
        }
    }

    pub(super) fn flag(&self, key: &str) -> Result<Option<bool>, ConvertError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        value
            .as_bool()
            .map(Some)
            .ok_or_else(|| wrong(key, value, "true or false"))
    }

    /// A list of names, one for each of `layers` layers.
    pub(super) fn per_layer(&self, key: &str, layers: u32) -> Result<Option<Vec<String>>, ConvertError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let expected = "a list of names, one a layer";
        let names: Option<Vec<String>> = value
            .as_array()
            .and_then(|list| list.iter().map(|name| Some(name.as_str()?.to_owned())).collect());
        let names = names.ok_or_else(|| wrong(key, value, expected))?;
        if names.len() != layers as usize {
            return Err(wrong(
                key,
                &Value::from(format!("{} names", names.len())),
                expected,
            ));
        }
        Ok(Some(names))
    }

    /// A list of layer numbers below `layers`.
    pub(super) fn layer_list(&self, key: &str, layers: u32) -> Result<Option<Vec<u32>>, ConvertError> {
        let Some(value) = self.get(key) else {
            return Ok(None);
        };
        let number = |value: &Value| {
            value
                .as_u64()
                .and_then(|n| u32::try_from(n).ok())
                .filter(|n| *n < layers)
        };
        let list: Option<Vec<u32>> = value
            .as_array()
            .and_then(|list| list.iter().map(number).collect());
        list.map(Some)
            .ok_or_else(|| wrong(key, value, "a list of layer numbers"))
    }

    pub(super) fn layers(&self) -> Result<u32, ConvertError> {
        let layers = self.count("num_hidden_layers", "says how many layers there are")?;
        if layers as usize > MAX_LAYERS {
            let expected = format!("at most {MAX_LAYERS}");
            return Err(wrong("num_hidden_layers", &Value::from(layers), expected));
        }
        Ok(layers)
    }

    /// An error for a feature that is not understood.
    pub(super) fn feature(&self, key: &str, why: &'static str) -> ConvertError {
        ConvertError::Feature {
            key: key.to_owned(),
            value: self.get(key).map_or("absent".to_owned(), short),
            why,
        }
    }

    /// A digest of everything in the configuration that decides what is computed: RoPE and the like.
    pub(super) fn digest(&self) -> String {
        let mut digested = self.nested.as_ref().unwrap_or(&self.root).clone();
        digested.retain(|key, _| !NOT_DIGESTED.contains(&key.as_str()));
        let mut canonical = String::new();
        write_canonical(&Value::Object(digested), &mut canonical);
        format!("blake3:{}", blake3::hash(canonical.as_bytes()).to_hex())
    }
}

/// JSON with sorted keys and no spaces.
fn write_canonical(value: &Value, out: &mut String) {
    match value {
        Value::Object(fields) => {
            let mut keys: Vec<&String> = fields.keys().collect();
            keys.sort();
            out.push('{');
            for key in keys {
                out.push_str(&Value::from(key.as_str()).to_string());
                out.push(':');
                write_canonical(&fields[key], out);
                out.push(',');
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for item in items {
                write_canonical(item, out);
                out.push(',');
            }
            out.push(']');
        }
        other => out.push_str(&other.to_string()),
    }
}

pub(super) fn wrong(key: &str, value: &Value, expected: impl Into<String>) -> ConvertError {
    ConvertError::Value {
        key: key.to_owned(),
        value: short(value),
        expected: expected.into(),
    }
}

/// A value as it stands in a message.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text,
    }
}
