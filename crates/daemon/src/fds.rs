//! How many files the daemon may have open, against what its configuration lets others make it open.

use rustix::process::{Resource, getrlimit, setrlimit};

use crate::config::Config;

/// With fewer it cannot even start: listeners, signals, threads' wake-ups, and some connections.
const LEAST: u64 = 64;

/// The limit is too low to begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "at most {allowed} files may be open (RLIMIT_NOFILE, ulimit -n), and kvferryd needs {LEAST} to start; this configuration \
     can need {needed}"
)]
pub struct TooFew {
    allowed: u64,
    needed: u64,
}

/// Raises the limit as far as the system allows, and warns where that is less than `config` can need.
pub fn raise(config: &Config) -> Result<(), TooFew> {
    let mut limit = getrlimit(Resource::Nofile);
    let before = limit.current;
    limit.current = limit.maximum;
    if let Err(error) = setrlimit(Resource::Nofile, limit) {
        tracing::warn!(%error, "the limit of open files could not be raised");
        limit.current = before;
    }
    // No number: without limit.
    let (allowed, needed) = (limit.current.unwrap_or(u64::MAX), needed(config));
    if allowed < LEAST {
        return Err(TooFew { allowed, needed });
    }
    if allowed < needed {
        tracing::warn!(
            allowed,
            needed,
            "fewer files may be open than limits.connections, limits.regions and limits.peers can need: raise RLIMIT_NOFILE \
             (LimitNOFILE= of a systemd unit), or lower them"
        );
    }
    Ok(())
}

/// Engines' connections, each with its process, their regions, and for each peer its channel and its lanes both ways, with
/// a wake-up each.
fn needed(config: &Config) -> u64 {
    let limits = &config.limits;
    let per_peer = config.lanes_per_peer.saturating_mul(4).saturating_add(1);
    let sum = limits
        .connections
        .saturating_mul(2)
        .saturating_add(limits.regions)
        .saturating_add(limits.peers.saturating_mul(per_peer));
    u64::try_from(sum).unwrap_or(u64::MAX).saturating_add(LEAST)
}

#[cfg(test)]
mod tests {
    use super::{LEAST, needed};
    use crate::config::Config;

    #[test]
    fn what_is_needed_follows_the_configuration() {
        let mut config = Config::default();
        config.limits.connections = 10;
        config.limits.regions = 5;
        config.limits.peers = 2;
        config.lanes_per_peer = 3;
        assert_eq!(needed(&config), 2 * 10 + 5 + 2 * 13 + LEAST);
        config.limits.peers = usize::MAX;
        assert_eq!(needed(&config), u64::MAX, "no overflow");
    }
}
