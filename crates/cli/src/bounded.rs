//! Reads files that somebody named, never more of them than is allowed.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

/// The text of a file of at most `most` bytes.
pub(crate) fn read_text(path: &Path, most: usize) -> std::io::Result<String> {
    let most = most as u64;
    let mut text = String::new();
    // Bounded while it is read: the size of a pipe or device cannot be asked for.
    File::open(path)?.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(std::io::Error::other(format!(
            "more than {most} bytes: this is no such file"
        )));
    }
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_more_is_read_than_allowed() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("text");
        std::fs::write(&path, "12345").unwrap();
        assert_eq!(read_text(&path, 5).unwrap(), "12345");
        assert!(read_text(&path, 4).unwrap_err().to_string().contains("4 bytes"));
        // Without an end.
        let error = read_text(Path::new("/dev/zero"), 1 << 16)
            .unwrap_err()
            .to_string();
        assert!(error.contains("65536 bytes"), "{error}");
    }
}
