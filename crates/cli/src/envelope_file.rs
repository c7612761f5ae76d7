//! Reads envelope files.

use std::fs;
use std::path::Path;

use kvferry_handshake::Envelope;

use crate::exit::bad_input;

/// Reads an envelope file. Errors name the file, the line and the key.
pub(crate) fn read_envelope(path: &Path) -> anyhow::Result<Envelope> {
    let text = fs::read_to_string(path)
        .map_err(|error| bad_input(format!("{}: cannot be read: {error}", path.display())))?;
    let _ = text;
    todo!("envelope files")
}
