//! Where the built programs are.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// `kvferryd`, as built with the running test.
pub fn kvferryd() -> PathBuf {
    directory().join("kvferryd")
}

/// `kvferry`, as built with the running test.
pub fn kvferry() -> PathBuf {
    directory().join("kvferry")
}

/// The folder of the programs: `KVFERRY_PROGRAMS`, or the target folder of the running test.
fn directory() -> &'static Path {
    static FOUND: OnceLock<PathBuf> = OnceLock::new();
    FOUND.get_or_init(|| {
        if let Some(given) = std::env::var_os("KVFERRY_PROGRAMS") {
            return given.into();
        }
        // target/PROFILE/deps/TEST-HASH
        let test = std::env::current_exe().unwrap();
        let profile = test.parent().and_then(Path::parent).unwrap().to_owned();
        build(&profile);
        for program in ["kvferryd", "kvferry"] {
            let path = profile.join(program);
            assert!(
                path.is_file(),
                "{} is not there: cargo build --workspace",
                path.display()
            );
        }
        profile
    })
}

/// Brings the programs up to date: `cargo test` builds only those of packages that it tests. Without cargo
/// around the test they are taken as they are.
fn build(profile: &Path) {
    let Some(cargo) = std::env::var_os("CARGO") else {
        return;
    };
    let name = profile.file_name().and_then(|name| name.to_str()).unwrap();
    let mut command = Command::new(cargo);
    command
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .args(["build", "--quiet", "--workspace", "--bins", "--profile"])
        .arg(if name == "debug" { "dev" } else { name })
        .arg("--target-dir")
        .arg(profile.parent().unwrap());
    // What cargo set for this test is not for the build.
    for (key, _) in std::env::vars_os() {
        if key
            .to_str()
            .is_some_and(|key| key.starts_with("CARGO_PKG_") || key.starts_with("CARGO_MANIFEST"))
        {
            command.env_remove(key);
        }
    }
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "the programs do not build:\n{}",
        String::from_utf8_lossy(&output.stderr)
    );
}
