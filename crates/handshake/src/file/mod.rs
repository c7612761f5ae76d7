//! The envelope file: an envelope as people write and read it. TOML; docs/envelope.md describes every key.

mod document;
mod key_at;
mod print;
mod problems;
mod resolve;
mod spots;

use std::fmt;

use crate::catalogue::Code;
use crate::envelope::Envelope;
use crate::launch::Arrangement;

/// Most bytes of an envelope file.
pub const MAX_ENVELOPE_FILE: usize = 64 << 20;

/// One thing that is wrong with a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileProblem {
    /// [`Code::FileInvalid`] where the file cannot be understood; the envelope's own codes where it can.
    pub code: Code,
    /// Line, from 1, where it is known.
    pub line: Option<usize>,
    /// The key, as a path: `component.kv.page_group`; empty where the message names it.
    pub key: String,
    /// What is wrong, and what to write.
    pub message: String,
}

/// Everything that is wrong with an envelope file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileError {
    /// The problems, never empty.
    pub problems: Vec<FileProblem>,
    /// Problems beyond those listed.
    pub more: usize,
}

impl FileError {
    /// The code of the first problem.
    pub fn code(&self) -> Code {
        self.problems
            .first()
            .map_or(Code::FileInvalid, |problem| problem.code)
    }
}

impl fmt::Display for FileProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(line) = self.line {
            write!(f, "line {line}: ")?;
        }
        write!(f, "{}: ", self.code)?;
        if !self.key.is_empty() {
            write!(f, "{}: ", self.key)?;
        }
        f.write_str(&self.message)
    }
}

impl fmt::Display for FileError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, problem) in self.problems.iter().enumerate() {
            if at > 0 {
                f.write_str("\n")?;
            }
            problem.fmt(f)?;
        }
        if self.more > 0 {
            write!(f, "\nand {} more", self.more)?;
        }
        Ok(())
    }
}

impl std::error::Error for FileError {}

impl Envelope {
    /// Reads an envelope file and validates what it says. Every problem that can be told at once is told.
    pub fn from_toml(text: &str) -> Result<Envelope, FileError> {
        resolve::resolve(text)
    }

    /// Writes the envelope as a file, with every rank's placements. It has to be valid.
    pub fn to_toml(&self) -> String {
        print::explicit(self)
    }

    /// Writes the envelope as a short file: the arrangement that its ranks were made from in place of the ranks,
    /// and `notes` as comments before everything.
    pub fn to_toml_arranged(&self, arrangement: &Arrangement, notes: &[String]) -> String {
        print::arranged(self, arrangement, notes)
    }
}
