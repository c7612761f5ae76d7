//! Calls of engines' ranks.

use kvferry_control::{Answer, Call, Fault, TransferId};
use kvferry_handshake::Code;

use crate::Broker;
use crate::fetches::check_id;
use crate::io::SessionId;
use crate::stated::Stated;

impl Broker {
    pub(crate) fn call(&mut self, session: SessionId, number: u64, call: Call) {
        let new = matches!(
            call,
            Call::Publish(_) | Call::Fetch(_) | Call::Expect { .. } | Call::Decline { .. }
        );
        if new && self.shutting_down {
            return self.answer(session, number, Err(crate::faults::shutting_down()));
        }
        match call {
            Call::Attach { envelope, rank, home } => {
                self.attach(session, number, Stated::new(*envelope), rank, home);
            }
            Call::Unregister { region } => self.unregister(session, number, region),
            Call::Publish(publish) => self.publish(session, number, publish),
            Call::Fetch(fetch) => self.fetch(session, number, fetch),
            Call::Abort { transfer } => {
                let answer = self.abort(session, &transfer);
                self.answer(session, number, answer.map(|()| Answer::Done));
            }
            Call::Expect { source, transfer } => {
                let answer = self.expect(session, &source, transfer, false);
                self.answer(session, number, answer.map(|()| Answer::Done));
            }
            Call::Decline { source, transfer } => {
                let answer = self.expect(session, &source, transfer, true);
                self.answer(session, number, answer.map(|()| Answer::Done));
            }
            Call::Register { .. } | Call::Status => {
                let fault = Fault::new(Code::Internal, "this call does not come here");
                self.answer(session, number, Err(fault));
            }
        }
    }

    fn abort(&mut self, session: SessionId, transfer: &TransferId) -> Result<(), Fault> {
        check_id(transfer)?;
        let (life, _) = self.attached(session)?;
        let cause = Fault::new(Code::Aborted, "aborted by its engine");
        let fetched = self.abort_fetch(life, transfer, &cause);
        let published = self.abort_publish(life, transfer, &cause.clone().into());
        if !fetched && !published {
            return Err(Fault::new(
                Code::TransferUnknown,
                format!(
                    "this rank has no open transfer {} attempt {}",
                    transfer.id, transfer.attempt
                ),
            ));
        }
        Ok(())
    }
}
