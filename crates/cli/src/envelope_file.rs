//! Reads envelope files.

use std::path::Path;

use kvferry_handshake::{Envelope, MAX_ENVELOPE_FILE};

use crate::bounded::read_text;
use crate::exit::bad_input;

/// Reads an envelope file. Every problem is told, with file, line and key.
pub(crate) fn read_envelope(path: &Path) -> anyhow::Result<Envelope> {
    let name = path.display();
    let text = read_text(path, MAX_ENVELOPE_FILE).map_err(|error| bad_input(format!("{name}: {error}")))?;
    Envelope::from_toml(&text).map_err(|error| {
        let problems: Vec<String> = error
            .to_string()
            .lines()
            .map(|line| format!("{name}: {line}"))
            .collect();
        bad_input(problems.join("\n"))
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::exit::{Exit, of_error};

    #[test]
    fn problems_name_file_line_and_key() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("engine.toml");
        fs::write(&path, "[engine]\nname = 3\n").unwrap();
        let error = read_envelope(&path).unwrap_err();
        assert_eq!(of_error(&error), Exit::Input);
        let told = "engine.toml: line 1: file_invalid: engine: ";
        assert!(error.to_string().contains(told), "{error}");
        let error = read_envelope(&dir.path().join("none.toml")).unwrap_err();
        assert!(error.to_string().contains("none.toml"), "{error}");
    }
}
