//! Files that an operator named: regular ones, and never more of them than is allowed.

use std::fs::{File, OpenOptions};
use std::io::{self, Read as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

/// Bytes of the longest file that is read.
const LONGEST: u64 = 1 << 20;

/// What the file holds.
pub(crate) fn read(path: &Path) -> io::Result<Vec<u8>> {
    let mut content = Vec::new();
    open(path)?.take(LONGEST + 1).read_to_end(&mut content)?;
    if u64::try_from(content.len()).is_ok_and(|len| len <= LONGEST) {
        return Ok(content);
    }
    Err(io::Error::other(format!("it has more than {LONGEST} bytes")))
}

/// Opens a regular file. A FIFO that nobody writes to would never open, and a device may never end.
fn open(path: &Path) -> io::Result<File> {
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
        return Err(io::Error::other("it is no regular file; name one"));
    }
    Ok(file)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_files_of_bounded_length_are_read() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("long");
        File::create(&long).unwrap().set_len(LONGEST + 1).unwrap();
        let error = read(&long).unwrap_err();
        assert!(error.to_string().contains("1048576 bytes"), "{error}");
        // Nobody writes to it: opening it as a file is opened would wait for ever.
        let fifo = folder.path().join("fifo");
        rustix::fs::mkfifoat(rustix::fs::CWD, &fifo, rustix::fs::Mode::RUSR).unwrap();
        for path in [fifo.as_path(), Path::new("/dev/zero")] {
            let error = read(path).unwrap_err();
            assert!(error.to_string().contains("no regular file"), "{error}");
        }
        let error = read(folder.path()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::IsADirectory);
    }
}
