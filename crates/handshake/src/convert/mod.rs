//! From a model's `config.json` (Hugging Face) and an engine's launch arguments to an envelope.
//!
//! What the two do not tell is assumed and noted; what the converter does not understand is refused by
//! name, never guessed. An engine that attaches states the truth itself: this is for `check`
//! and `plan`, before anything runs.

mod arguments;
mod attention;
mod components;
mod config;
mod elements;
mod engine;
mod state;

pub use config::MAX_CONFIG;

use crate::catalogue::Code;
use crate::envelope::{Envelope, Role};
use crate::launch::{Arrangement, LaunchError};

/// Whose arguments they are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Framework {
    /// vLLM.
    Vllm,
    /// SGLang.
    Sglang,
}

/// What neither the configuration nor the arguments say.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ConvertOptions {
    /// Engine name; `None`: the role's name.
    pub engine: Option<String>,
    /// Role; `None`: from the arguments, else both.
    pub role: Option<Role>,
    /// Version of the framework.
    pub framework_version: Option<String>,
    /// Pages of each pool.
    pub pool_pages: Option<u32>,
    /// Read the configuration as if its `model_type` were this.
    pub model_type: Option<String>,
}

/// Something that was assumed, or that nobody stated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// The field of the envelope that it is about.
    pub field: String,
    /// What was assumed, and how to find out.
    pub text: String,
}

/// An envelope, and how much of it is certain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Converted {
    /// The envelope; valid.
    pub envelope: Envelope,
    /// What its ranks were made from.
    pub arrangement: Arrangement,
    /// What was assumed.
    pub notes: Vec<Note>,
}

/// Why there is no envelope.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConvertError {
    /// The configuration is no JSON object.
    #[error("the configuration is no JSON: {cause}")]
    NoJson {
        /// Where and why.
        cause: String,
    },
    /// A key is missing.
    #[error("the configuration has no {key:?}, which {wanted}")]
    Missing {
        /// The key.
        key: String,
        /// What for.
        wanted: &'static str,
    },
    /// A key's value is not of its kind.
    #[error("the configuration's {key:?} is {value}; expected {expected}")]
    Value {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it should be.
        expected: String,
    },
    /// The model's kind is not known.
    #[error(
        "model_type {name:?} is not known to the converter; write the envelope by hand (docs/envelope.md), or, if the \
         model caches like a known one, add --model-type with one of: {}",
        known_types()
    )]
    ModelType {
        /// The kind.
        name: String,
    },
    /// The model has something that the converter does not understand.
    #[error("the configuration's {key:?} is {value}: {why}; write the envelope by hand (docs/envelope.md)")]
    Feature {
        /// The key.
        key: String,
        /// Its value.
        value: String,
        /// What it means.
        why: &'static str,
    },
    /// A launch argument cannot be used.
    #[error("argument {flag}: {why}")]
    Argument {
        /// The flag or variable.
        flag: String,
        /// What is wrong with it, and what to do.
        why: String,
    },
    /// The model cannot be launched like this.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

fn known_types() -> String {
    let mut known: Vec<&str> = attention::known().chain(state::known()).collect();
    known.sort_unstable();
    known.join(", ")
}

impl ConvertError {
    /// The stable code.
    pub fn code(&self) -> Code {
        Code::FileInvalid
    }
}

impl Converted {
    /// The envelope file: the short form, with the notes as comments before it.
    pub fn to_toml(&self) -> String {
        let mut comments = vec![
            "Made from config.json and launch arguments. An engine that attaches states its own envelope."
                .to_owned(),
        ];
        if !self.notes.is_empty() {
            comments.push("What could not be known:".to_owned());
        }
        comments.extend(
            self.notes
                .iter()
                .map(|note| format!("- {}: {}", note.field, note.text)),
        );
        self.envelope.to_toml_arranged(&self.arrangement, &comments)
    }
}

/// Makes an envelope from the text of a `config.json` and a launch command's words: everything after the program's
/// name, or the whole command; variables may stand before it (`VLLM_KV_CACHE_LAYOUT=HND vllm serve ...`).
pub fn convert(
    config: &str,
    framework: Framework,
    arguments: &[String],
    options: &ConvertOptions,
) -> Result<Converted, ConvertError> {
    let config = config::Config::parse(config, options.model_type.as_deref())?;
    let given = arguments::Given::parse(framework, arguments)?;
    engine::Engine::new(&config, framework, &given, options).convert()
}

/// Notes as they are taken.
#[derive(Default)]
struct Notes(Vec<Note>);

impl Notes {
    fn add(&mut self, field: &str, text: impl Into<String>) {
        let note = Note {
            field: field.to_owned(),
            text: text.into(),
        };
        if !self.0.contains(&note) {
            self.0.push(note);
        }
    }
}
