//! Pairs of data planes, driven through their public interface.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod pair;
mod transfers;
