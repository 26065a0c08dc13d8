//! What handlers hold of the engine's thread.

use std::sync::{Arc, OnceLock};

use canopy_e2e::constrain::Grammar;
use canopy_e2e::engine::GenerateRequest;
use tokio::sync::{mpsc, oneshot};

use super::{Health, ModelInfo, Update};
use crate::error::ApiError;
use crate::queue::Permit;

pub(super) struct Submit {
    pub request: GenerateRequest,
    pub grammar: Option<Grammar>,
    pub permit: Permit,
    pub reply: oneshot::Sender<Result<mpsc::Receiver<Update>, ApiError>>,
}

pub(super) enum Command {
    Submit(Box<Submit>),
    EndAll(ApiError),
}

/// Talks to the engine's thread. The thread ends when the last handle is gone.
#[derive(Clone, Debug)]
pub struct EngineHandle {
    commands: mpsc::Sender<Command>,
    model: Arc<OnceLock<ModelInfo>>,
    health: Arc<Health>,
}

impl EngineHandle {
    pub(super) fn new(commands: mpsc::Sender<Command>) -> Self {
        Self { commands, model: Arc::default(), health: Arc::default() }
    }

    /// What the thread fills in.
    pub(super) fn shared(&self) -> (Arc<OnceLock<ModelInfo>>, Arc<Health>) {
        (Arc::clone(&self.model), Arc::clone(&self.health))
    }

    /// The served model, or 503 while it is being loaded.
    pub fn model(&self) -> Result<&ModelInfo, ApiError> {
        self.model.get().ok_or_else(ApiError::loading)
    }

    /// Where the thread stands.
    pub fn health(&self) -> &Health {
        &self.health
    }

    /// Hands a request to the engine, with its constraint compiled; an error of the request comes back before any update.
    pub async fn submit(
        &self,
        request: GenerateRequest,
        grammar: Option<Grammar>,
        permit: Permit,
    ) -> Result<mpsc::Receiver<Update>, ApiError> {
        let (reply, answer) = oneshot::channel();
        let stopped = || ApiError::engine_down("has stopped");
        let command = Command::Submit(Box::new(Submit { request, grammar, permit, reply }));
        self.commands.send(command).await.map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// Ends every stream with `error`, and every later one.
    pub async fn end_all(&self, error: ApiError) {
        // A closed channel means that the thread, and with it every stream, has ended.
        let _ = self.commands.send(Command::EndAll(error)).await;
    }
}
