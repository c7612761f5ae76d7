//! The protocol versions that two sides have in common.

use std::fmt;

use serde::{Deserialize, Serialize};

/// The protocol versions that a side speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Versions {
    /// Lowest.
    pub lowest: u32,
    /// Highest.
    pub highest: u32,
}

/// Two sides speak no version in common: [`crate::Code::ProtocolVersion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no common protocol version: this side speaks {ours}, the other {theirs}; upgrade the older side")]
pub struct NoCommonVersion {
    /// What this side speaks.
    pub ours: Versions,
    /// What the other side speaks.
    pub theirs: Versions,
}

impl Versions {
    /// The highest version that both sides speak.
    pub fn common(self, theirs: Versions) -> Result<u32, NoCommonVersion> {
        let lowest = self.lowest.max(theirs.lowest);
        let highest = self.highest.min(theirs.highest);
        if lowest > highest {
            return Err(NoCommonVersion { ours: self, theirs });
        }
        Ok(highest)
    }
}

impl fmt::Display for Versions {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.lowest == self.highest {
            true => write!(f, "{}", self.lowest),
            false => write!(f, "{} to {}", self.lowest, self.highest),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_common_version_is_spoken() {
        let speaks = |lowest, highest| Versions { lowest, highest };
        assert_eq!(speaks(1, 3).common(speaks(2, 5)), Ok(3));
        assert_eq!(speaks(2, 5).common(speaks(1, 3)), Ok(3));
        assert_eq!(speaks(1, 1).common(speaks(1, 1)), Ok(1));
        let error = speaks(1, 2).common(speaks(3, 4)).unwrap_err().to_string();
        assert!(error.contains("1 to 2") && error.contains("3 to 4"), "{error}");
        assert!(speaks(3, 4).common(speaks(1, 2)).is_err());
        // A range that runs backwards is no version at all.
        assert!(speaks(1, 9).common(speaks(5, 4)).is_err());
    }
}
