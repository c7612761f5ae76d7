//! Pairs of data planes, driven through their public interface.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod faults;
mod fences;
mod hostile;
mod let_go;
mod lifecycle;
mod pair;
mod processes;
mod receivers;
mod registration;
mod slow;
mod tls;
mod transfers;
