//! What is wrong with a file, as it is found.

use std::ops::Range;

use toml::Spanned;

use super::{FileError, FileProblem};
use crate::catalogue::Code;
use crate::validate::EnvelopeFault;

/// Problems listed of one file; the rest is counted.
const MAX_PROBLEMS: usize = 50;

/// Problems as they are found, with the lines they are on.
pub(super) struct Problems<'a> {
    text: &'a str,
    found: Vec<FileProblem>,
    more: usize,
}

impl Problems<'_> {
    pub(super) fn new(text: &str) -> Problems<'_> {
        Problems {
            text,
            found: Vec::new(),
            more: 0,
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.found.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.found.len()
    }

    /// Problems that are counted only.
    pub(super) fn add_more(&mut self, more: usize) {
        self.more += more;
    }

    fn line(&self, at: usize) -> usize {
        let before = self.text.as_bytes().get(..at).unwrap_or_default();
        before.iter().filter(|byte| **byte == b'\n').count() + 1
    }

    pub(super) fn add(&mut self, span: Option<&Range<usize>>, key: &str, message: String) {
        self.push(Code::FileInvalid, span.map(|span| span.start), key, message);
    }

    pub(super) fn add_fault(&mut self, at: Option<usize>, fault: &EnvelopeFault) {
        self.push(fault.code, at, &fault.field, fault.message.clone());
    }

    fn push(&mut self, code: Code, at: Option<usize>, key: &str, message: String) {
        if self.found.len() >= MAX_PROBLEMS {
            self.more += 1;
            return;
        }
        self.found.push(FileProblem {
            code,
            line: at.map(|at| self.line(at)),
            key: key.to_owned(),
            message,
        });
    }

    /// The position of a name among those there are; 0 where there is none, which is told.
    pub(super) fn position(
        &mut self,
        name: &Spanned<String>,
        names: &[&str],
        key: impl FnOnce() -> String,
    ) -> usize {
        names
            .iter()
            .position(|known| known == name.get_ref())
            .unwrap_or_else(|| {
                let message = format!(
                    "{:?} is not there; there are: {}",
                    name.get_ref(),
                    names.join(", ")
                );
                self.add(Some(&name.span()), &key(), message);
                0
            })
    }

    pub(super) fn into_error(self) -> FileError {
        FileError {
            problems: self.found,
            more: self.more,
        }
    }
}
