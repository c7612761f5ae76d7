//! `kvferry envelope`: an envelope file from a model's config.json and an engine's launch command.

use std::fs;
use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use kvferry_handshake::{ConvertOptions, Framework, MAX_CONFIG, Role, convert};

use crate::bounded::read_text;
use crate::exit::{Exit, bad_input, tell};
use crate::text::labelled;

/// Makes an envelope file from a model's config.json and the engine's launch command.
///
/// Give the command that starts the engine after `--`, variables included: of its arguments, those that decide the
/// geometry are read (page or block size, KV dtype, TP, PP, DCP, prefill CP, layout), under the names that vLLM and
/// SGLang give them. What the two do not tell is assumed, and listed on standard error and in the file: look it up
/// before you rely on it. An engine that attaches states its own envelope; this is for `check` and `plan` beforehand.
#[derive(Args, Debug)]
#[command(
    after_help = "Example:\n  kvferry envelope --config config.json -o prefill.toml -- \\\n    vllm serve \
    meta-llama/Llama-3.1-8B --tensor-parallel-size 4 --block-size 16 --kv-cache-dtype bfloat16"
)]
pub struct EnvelopeOf {
    /// The model's config.json, as on Hugging Face
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Whose launch command it is; without it, told by the command's words
    #[arg(long, value_enum)]
    framework: Option<FrameworkName>,
    /// Its version
    #[arg(long, value_name = "VERSION")]
    framework_version: Option<String>,
    /// Engine name; the role's name unless given
    #[arg(long, value_name = "NAME")]
    engine: Option<String>,
    /// What the engine does; told by the command where it can be
    #[arg(long, value_enum)]
    role: Option<RoleName>,
    /// Pages in each rank's pool: vLLM logs num_gpu_blocks, SGLang max_total_num_tokens
    #[arg(long, value_name = "N")]
    pool_pages: Option<u32>,
    /// Read the configuration as if its model_type were this, where a model caches like a known one
    #[arg(long, value_name = "TYPE")]
    model_type: Option<String>,
    /// Write the file here; to standard output unless given
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,
    /// The launch command, after `--`
    #[arg(last = true, value_name = "COMMAND")]
    command: Vec<String>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum FrameworkName {
    Vllm,
    Sglang,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum RoleName {
    Prefill,
    Decode,
    Both,
}

impl EnvelopeOf {
    pub(crate) fn run(&self, out: &mut impl Write) -> anyhow::Result<Exit> {
        let config = self.config.display();
        let text =
            read_text(&self.config, MAX_CONFIG).map_err(|error| bad_input(format!("{config}: {error}")))?;
        let options = ConvertOptions {
            engine: self.engine.clone(),
            role: self.role.map(|role| match role {
                RoleName::Prefill => Role::Prefill,
                RoleName::Decode => Role::Decode,
                RoleName::Both => Role::Both,
            }),
            framework_version: self.framework_version.clone(),
            pool_pages: self.pool_pages,
            model_type: self.model_type.clone(),
        };
        let converted = convert(&text, self.framework()?, &self.command, &options)
            .map_err(|error| bad_input(format!("{config}: {}: {error}", error.code())))?;
        let mut file = converted.to_toml();
        if !file.ends_with('\n') {
            file.push('\n');
        }
        match &self.output {
            None => out.write_all(file.as_bytes())?,
            Some(path) => fs::write(path, file)
                .map_err(|error| bad_input(format!("--output {}: {error}", path.display())))?,
        }
        let mut told = Vec::new();
        if !converted.notes.is_empty() {
            writeln!(told, "What could not be known, and was assumed:")?;
        }
        for note in &converted.notes {
            writeln!(told, "  {}", note.field)?;
            labelled(&mut told, "", &note.text)?;
        }
        tell(String::from_utf8_lossy(&told));
        Ok(Exit::Done)
    }

    fn framework(&self) -> anyhow::Result<Framework> {
        match self.framework {
            Some(FrameworkName::Vllm) => return Ok(Framework::Vllm),
            Some(FrameworkName::Sglang) => return Ok(Framework::Sglang),
            None => {}
        }
        let names = |framework: &str| {
            self.command
                .iter()
                .any(|word| word.to_ascii_lowercase().contains(framework))
        };
        match (names("vllm"), names("sglang")) {
            (true, false) => Ok(Framework::Vllm),
            (false, true) => Ok(Framework::Sglang),
            _ => Err(bad_input(
                "the command tells neither vLLM nor SGLang: add --framework vllm or --framework sglang, and the \
                 launch command after --",
            )),
        }
    }
}
