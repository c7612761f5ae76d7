//! Reads files that somebody named: regular ones, and never more of them than is allowed.

use std::fs::OpenOptions;
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// The text of a regular file of at most `most` bytes.
pub(crate) fn read_text(path: &Path, most: usize) -> io::Result<String> {
    // A FIFO that nobody writes to would never open.
    let never_wait = rustix::fs::OFlags::NONBLOCK.bits();
    let never_wait = i32::try_from(never_wait).map_err(io::Error::other)?;
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(never_wait)
        .open(path)?;
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(io::ErrorKind::IsADirectory.into());
    }
    if !kind.is_file() {
        return Err(io::Error::other(
            "it is no regular file; write what it gives to one first",
        ));
    }
    let most = most as u64;
    let mut text = String::new();
    // Bounded while it is read: a file may grow meanwhile.
    file.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(io::Error::other(format!(
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
        let fifo = dir.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/zero")] {
            let error = read_text(path, 1 << 16).unwrap_err().to_string();
            assert!(error.contains("no regular file"), "{error}");
        }
        let error = read_text(dir.path(), 1 << 16).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    }
}
